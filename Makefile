# `make demo` and `make test` need Python 3.11 or later, pip and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROCESSES ?= 2
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test quick lint test-portable test-data test-flower test-faults test-browser test-track test-gpu test-slow results docs clean

help:
	@echo "make demo       install, then compare six methods on the embedded data set, with a report (a minute)"
	@echo "make test       install, then lint, types and all quick tests (PROCESSES=2; 0: all in one)"
	@echo "make test-portable  the numeric tests under other instructions, threads, orders and paths (minutes)"
	@echo "make test-data  fetch the real data sets and run the tests that need them"
	@echo "make test-flower, test-faults, test-browser, test-track, test-gpu, test-slow: the longer suites"
	@echo "make results    redraw the figures and tables of docs/results from the stored runs (needs CIFAR-10)"
	@echo "make docs       build the documentation into site/"

# An installed set is remembered by a stamp, so that a second call installs nothing.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,flower,data,hf,privacy]'
	@touch $@ $(VENV)/core.stamp

$(VENV)/docs.stamp: $(VENV)/dev.stamp
	$(PIP) -e '.[dev,docs]'
	@touch $@

$(VENV)/track.stamp: $(VENV)/dev.stamp
	$(PIP) -e '.[dev,track]'
	@touch $@

demo: $(VENV)/core.stamp
	$(BIN)/fedlalr compare quickstart --seeds 3 --run-dir runs/demo \
		--methods fedlalr,fedavg,fedadam,fedamsv1,fedamsv2,lafedopt,fedlalr+balanced

# The type checker runs beside the tests.
test: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory -j 2 quick lint

# A process that is done takes tests from the other. Those that tests start need not compile the sources again.
quick: export PYTHONDONTWRITEBYTECODE :=
quick: $(VENV)/dev.stamp
	$(BIN)/slipcover --json --out .slipcover.json -m pytest -n $(PROCESSES) --dist worksteal --durations=25
	$(BIN)/slipcover --merge .slipcover.json --out .slipcover.json --fail-under 95

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The numeric tests as other processors, libraries and surroundings would compute them; each word of SETTINGS is a run.
# Two threads run in one process: beside another busy process they stall.
SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_CBWR=COMPATIBLE \
	ONEDNN_MAX_CPU_ISA=AVX2 LC_ALL=C OMP_NUM_THREADS=2
NUMERIC := tests/algorithms tests/models tests/theory tests/test_contract.py tests/test_learning.py \
	$(addprefix tests/federation/,test_run.py replies/test_reducing.py replies/test_reductions.py test_evaluation.py test_gradient_norms.py) \
	$(addprefix tests/training/,engines/test_engines.py stacked kernels/test_kernels.py) \
	$(addprefix tests/training/test_,other_gradients.py own_methods.py clipping.py)

test-portable: $(VENV)/dev.stamp
	@for setting in $(SETTINGS); do echo "$$setting, random order, a path with spaces and accents"; \
		folder="$$(mktemp -d)/ein größerer Pfad"; \
		case $$setting in OMP_*) count=0;; *) count=$(PROCESSES);; esac; \
		env $$setting $(BIN)/python -m pytest -n $$count --dist worksteal --shuffle $$$$ --basetemp "$$folder" -m 'not gpu' $(NUMERIC) \
		|| exit 1; done

test-data: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m data -rs

test-flower: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests/flower -m flower -n 4 --dist loadfile --durations=25

test-faults: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m faults

test-browser: $(VENV)/docs.stamp
	$(BIN)/python -m pytest -m browser

test-track: $(VENV)/track.stamp
	$(BIN)/python -m pytest tests/report/test_trackers.py

test-gpu: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m gpu

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

# Figures, verdicts and tables of docs/results, from the runs that are stored there.
DRAW = $(BIN)/fedlalr reproduce --scale paper --run-dir docs/results --draw-only
results: $(VENV)/core.stamp
	$(DRAW) cifar dtype=bfloat16 --seeds 3 \
		--beside fedavg:lr=0.5 --beside fedadam:server_lr=0.1 \
		--beside fedamsv1:server_lr=0.03 --beside fedamsv2:server_lr=0.03 --beside lafedopt:lr=0.002
	$(DRAW) cifar dtype=bfloat16 buffers=recalibrate
	$(DRAW) shakespeare dtype=bfloat16 --beside fedlalr:lr=0.015,eps=1e-4 --beside fedavg:lr=5 \
		--beside fedadam:lr=1,server_lr=0.01,eps=1e-4 --beside fedamsv1:lr=1,server_lr=0.1,eps=1e-4 \
		--beside fedamsv2:lr=1,server_lr=0.01,eps=1e-4 --beside lafedopt:lr=0.01,eps=1e-4
	for figure in interval trajectory scalability choices variants; do \
		$(DRAW) $$figure dtype=bfloat16 || exit 1; done
	$(DRAW) heterogeneity --seeds 3
	$(DRAW) speedup
	$(BIN)/python -m fedlalr.paper.results_page docs/results

docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site runs .slipcover.json .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The quick tests with the oldest versions that pyproject.toml allows and with the newest that are published, each in
# an environment of its own. The newest are tried twice: Flower holds some of the others back, so first without it.
.PHONY: test-oldest test-newest
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.13
SUITE := -m pytest -n $(PROCESSES) --dist loadfile -p no:cacheprovider

test-oldest:
	$(OLDEST_PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python .ci/oldest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet uv  # pip downloads every large wheel that it tries
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python -c .venv-oldest/constraints.txt \
		-e '.[dev,flower,data,hf,privacy,track]'
	.venv-oldest/bin/python $(SUITE)

test-newest:
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet uv
	.venv-newest/bin/uv pip install --quiet --python .venv-newest/bin/python -e '.[dev,data,hf,privacy,track]'
	.venv-newest/bin/python $(SUITE) --ignore tests/flower
	.venv-newest/bin/uv pip install --quiet --python .venv-newest/bin/python -e '.[dev,flower,data,hf,privacy,track]'
	.venv-newest/bin/python $(SUITE) tests/flower
