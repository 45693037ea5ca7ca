"""Each program of the page on transformers runs alone, and so does the notebook."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n+```python\n(.*?)^```", PAGE, flags=re.S | re.M))
MISSING = [name for name in ("transformers", "peft", "datasets") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason="the extra hf is not installed")


def test_every_program_of_the_page_is_tried() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") == 3


@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_runs_alone_and_learns(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(PROGRAMS[title])
    first, last = found["result"].history[0], found["result"].history[-1]
    assert last.loss < first.loss
    assert any(tmp_path.rglob("*.safetensors"))


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    book = json.loads((ROOT / "examples" / "transformers.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    found = run("\n".join(cells))
    assert found["lora"].history[-1].accuracy > 0.9
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def run(program: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program", "exec", dont_inherit=True), namespace)
    return namespace
