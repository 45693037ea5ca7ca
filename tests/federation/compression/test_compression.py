"""Compression around any algorithm: what arrives, what the clients keep, what is counted, and what is rejected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlalr as fl
from conftest import make_clients, make_model
from docs.tables import bytes_table, combinations_table
from fedlalr.config import Config, ConfigError, load
from fedlalr.config.build import build_options
from fedlalr.data.population import as_clients
from fedlalr.federation.combinations import COMBINATIONS, check_combinations
from fedlalr.federation.compression import channel as channels
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import SHORT_FORMS, compression_for, is_relative
from fedlalr.federation.options import Options
from fedlalr.federation.problem import Problem
from fedlalr.federation.run import Simulation
from fedlalr.federation.session import Session
from fedlalr.training import Training
from fedlalr.training.layout import Layout
from variants import VARIANTS

Int, Log, BFloat16 = fl.codecs.Int, fl.codecs.Log, fl.codecs.BFloat16
BEST = fl.FedLALR(momentum="restart", second_moment="max")
SETTINGS = {"rounds": 3, "local": fl.Steps(3), "batch_size": 4, "clients_per_round": 4, "seed": 5}


def run(algorithm: fl.Algorithm = BEST, **options: Any) -> fl.Result:
    model, clients = options.pop("model", None) or make_model(), options.pop("clients", None) or make_clients()
    return fl.run(model, clients, algorithm, **({"engine": "reference"} | SETTINGS | options))


def session(algorithm: fl.Algorithm, **options: Any) -> Session:
    """A run whose state can be read after every round."""
    given = Options.named({"engine": "reference"} | SETTINGS | options)
    problem = Problem.of(make_model(), as_clients(make_clients()), algorithm, given)
    return Session(problem, Simulation(problem))


def flat(result: fl.Result, slot: str) -> Tensor:
    return torch.cat([value.flatten() for value in result.state[slot].values()])


def same(first: fl.Result, second: fl.Result) -> bool:
    return all(torch.equal(flat(first, slot), flat(second, slot)) for slot in first.state)


@dataclass(frozen=True)
class Constant:
    """Every client adds the same numbers to x in every round."""

    lr: float = 0.1
    fail: int = 0
    """Client 0 sends a number that is not finite in this round."""

    @property
    def slots(self) -> fl.SlotTable:
        return fl.SlotTable(down=("x",), up={"x": "mean"})

    def init(self, params: Tensor) -> fl.Slots:
        return fl.Slots(x=params)

    def start(self, broadcast: fl.Slots, kept: fl.Slots) -> fl.Slots:
        return fl.Slots(x=broadcast.x)

    def step(self, client: fl.Slots, gradient: Tensor, broadcast: fl.Slots, context: fl.Context) -> fl.Slots:
        change = torch.linspace(-1, 1, client.x.shape[-1], dtype=client.x.dtype) ** 3 * self.lr
        return fl.Slots(x=client.x + change)

    def finish(self, client: fl.Slots, broadcast: fl.Slots, context: fl.Context) -> tuple[fl.Slots, fl.Slots]:
        return client, fl.Slots()

    def update(self, server: fl.Slots, reduced: fl.Slots, context: fl.Context) -> fl.Slots:
        return reduced


WITH_SHORT_FORM = [(name, "balanced") for name in VARIANTS]
WITH_SHORT_FORM += [(name, "smallest") for name in ("fedlalr restart max", "alignedlalr keep", "scaffold")]


@pytest.mark.parametrize(("name", "short"), WITH_SHORT_FORM)
def test_every_method_runs_with_a_short_form(name, short):
    whole, small = (run(VARIANTS[name], compression=choice, rounds=2) for choice in (None, short))
    assert not any(record.rejected for record in small.history)
    assert small.bytes_up < whole.bytes_up
    assert small.bytes_down < whole.bytes_down
    # It learns the same: the compressed run is nearer to the other than the other is to its start.
    start = torch.cat([value.flatten() for value in make_model().state_dict().values()])
    assert (flat(small, "x") - flat(whole, "x")).norm() < 0.5 * (flat(whole, "x") - start).norm()


@pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS)
def test_a_short_form_keeps_the_small_numbers_of_what_a_method_divides_by(algorithm):
    for short in SHORT_FORMS.values():
        chosen = short(algorithm)
        chosen.check(algorithm)
        assert chosen.up.keys() == algorithm.slots.up.keys() - set(algorithm.slots.blocks)
        assert chosen.down.keys() == set(algorithm.slots.down) - set(algorithm.slots.blocks)
        sent = {*chosen.up, *chosen.down}
        relative = [slot for slot in sent if is_relative(algorithm, slot)]
        assert sent & {"v", "v_hat"} <= set(relative)
        assert not any(isinstance(codecs.get(slot), Int) for slot in relative for codecs in (chosen.up, chosen.down))


@pytest.mark.parametrize("method", [BEST, fl.AlignedLALR(align=0.0, keep=0.5)], ids=["fedlalr", "alignedlalr"])
def test_bytes_a_parameter_of_fedlalr(method):
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    clients = [(torch.randn(4, 100), torch.randint(0, 100, (4,))) for _ in range(2)]
    parameters, rounds = sum(p.numel() for p in model.parameters()), 3
    options: dict[str, Any] = {"clients_per_round": 2, "rounds": rounds, "model": model, "clients": clients}
    most = {"balanced": (1.55, 3.1), "smallest": (0.9, 2.1)}
    for short, (up, down) in most.items():
        result = run(method, compression=short, **options)
        assert result.bytes_up / parameters / 2 / rounds <= up
        assert result.bytes_down / parameters / 2 / rounds <= down
    result = run(method, **options)
    assert result.bytes_up == result.bytes_down == 8 * parameters * 2 * rounds


def test_recorded_bytes_are_those_that_encoding_returns():
    model = make_model().float()
    training = Training(model, Layout.of(model), as_clients(make_clients()), BEST)
    chosen = compression_for("smallest", BEST)
    slots = BEST.init(training.layout.flatten(dict(model.named_parameters())))
    for t in (1, 2):
        channel = Channel.of(chosen, training, t)
        down = channel.encode_broadcast(slots)
        stack = slots.map(lambda slot: slot.repeat(2, 1))
        broadcast = channel.broadcast(slots)
        error = torch.zeros_like(stack.x)
        up = {
            name: channel.encode_reply(name, stack[name], broadcast, error if name == "x" else None, [0, 1])[0]
            for name in channel.table.up
        }
        assert channel.bytes_down == sum(content.numel() for content in down.values())
        assert 2 * channel.bytes_up == sum(content.numel() for content in up.values())
        assert ("v_hat" in up) is (t == 1)


def test_the_server_keeps_its_exact_value_whatever_the_broadcast_loses():
    result = run(Constant(1e-300), compression=fl.Compression(down={"x": Int(4)}))
    assert torch.equal(flat(result, "x"), torch.cat([p.flatten() for p in make_model().parameters()]).detach())


def test_changes_are_measured_from_what_the_client_decoded():
    """A coarse broadcast alone loses nothing of a change that does not depend on x."""
    whole = run(Constant())
    coarse = run(Constant(), compression=fl.Compression(down={"x": Int(4)}))
    torch.testing.assert_close(flat(coarse, "x"), flat(whole, "x"), rtol=1e-12, atol=1e-12)


def test_second_moments_never_fall_and_stay_above_their_floor():
    algorithm = fl.FedLALR(eps=1e-3)
    with session(algorithm, compression="balanced", rounds=6) as running:
        before = running.state.slots.v_hat
        for _ in running.rounds():
            channel = Channel.of(running.problem.rules.compression, running.training, running.state.round + 1)
            now = running.state.slots.v_hat
            assert (now >= before).all()
            assert (channel.broadcast(running.state.slots).v_hat >= 1e-6).all()
            before = now
    assert (before > 1e-6).any()


def test_feedback_loses_nothing_over_time():
    """Without it, the same rounding error is added in every round."""
    rounds = 10
    wanted = run(Constant(), rounds=rounds)
    step = 3 * 0.1 / 7 * (1 + 2.0**-8)  # three local steps, seven levels
    for feedback, bound in ((True, step), (False, None)):
        chosen = fl.Compression(up={"x": Int(4, 1024, "nearest", feedback=feedback)})
        found = run(Constant(), rounds=rounds, compression=chosen, clients_per_round=None)
        error = (flat(found, "x") - flat(wanted, "x")).abs().max()
        assert error <= bound if bound is not None else error > 2 * step


def test_the_error_is_kept_only_with_an_accepted_reply():
    chosen = fl.Compression(up={"x": Int(8, feedback=True)})
    clients = make_clients()
    with session(Constant(), compression=chosen, clients_per_round=None) as running:
        rounds = running.rounds()
        next(rounds)
        before = dict(running.state.kept)
        assert set(before) == set(range(len(clients)))
        assert all(kept["residual.x"].abs().max() > 0 for kept in before.values())
        train = running.transport._chosen.train

        def poisoned(work):
            replies = train(work)
            replies.slots.x[0, 3] = torch.nan
            return replies

        running.transport._chosen.train = poisoned
        with pytest.warns(fl.RepliesRejected):
            record = next(rounds)
        assert [client for client, _ in record.rejected] == [0]
        assert running.state.kept[0] is before[0]
        assert running.state.kept[1] is not before[1]
        assert torch.isfinite(running.state.slots.x).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("short", SHORT_FORMS)
def test_a_reply_that_is_not_finite_is_rejected(short, poison):
    clients = make_clients()
    clients[2][0][0, 0] = poison
    with pytest.warns(fl.RepliesRejected):
        result = run(compression=short, clients=clients, clients_per_round=None, local=fl.Epochs(1))
    assert all([client for client, _ in record.rejected] == [2] for record in result.history)


def test_a_slot_with_a_period_stands_in_other_rounds():
    chosen = fl.Compression(every={"v_hat": 3})
    with session(BEST, compression=chosen, rounds=5) as running:
        values, sizes = [running.state.slots.v_hat], []
        for record in running.rounds():
            values.append(running.state.slots.v_hat)
            sizes.append(record.bytes_up)
    changed = [not torch.equal(before, after) for before, after in pairwise(values)]
    assert changed == [True, False, False, True, False]
    assert sizes == [2 * sizes[1], sizes[1], sizes[1], 2 * sizes[1], sizes[1]]


@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [
        ("stacked", fl.FedLALR()),
        ("stacked", fl.SCAFFOLD()),
        ("distributed", fl.FedLALR()),
        pytest.param("workers:2", fl.SCAFFOLD(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_engine_agrees_with_the_reference(engine, algorithm):
    reference = run(algorithm, compression="smallest")
    other = run(algorithm, compression="smallest", engine=engine)
    for slot in reference.state:
        torch.testing.assert_close(flat(other, slot), flat(reference, slot), rtol=1e-10, atol=1e-12)


def test_encoding_some_rows_at_a_time_gives_the_same_bits(monkeypatch):
    whole = run(compression="balanced")
    monkeypatch.setattr(channels, "NUMBERS_AT_A_TIME", 1)
    assert same(run(compression="balanced"), whole)


@pytest.mark.parametrize("algorithm", [BEST, fl.SCAFFOLD()], ids=lambda a: type(a).__name__)
def test_a_run_resumes_to_the_same_bits(algorithm, tmp_path):
    whole = run(algorithm, compression="smallest", rounds=5)
    run(algorithm, compression="smallest", rounds=2, run_dir=tmp_path)
    resumed = run(algorithm, compression="smallest", rounds=5, run_dir=tmp_path, resume=True)
    assert same(resumed, whole)
    assert [r.bytes_up for r in resumed.history] == [r.bytes_up for r in whole.history]


def test_a_run_does_not_resume_with_another_compression(tmp_path):
    run(compression="balanced", rounds=1, run_dir=tmp_path)
    with pytest.raises(fl.RunDirectoryError, match=r"compression\.up\.x"):
        run(compression="smallest", run_dir=tmp_path, resume=True)
    spelled_out = compression_for("balanced", BEST)
    assert len(run(compression=spelled_out, run_dir=tmp_path, resume=True).history) == 3


@pytest.mark.parametrize("how", ["median", "trimmed", "bounded", "mean", "max"])
def test_robust_reductions_work_on_what_was_decoded(how):
    options = {"reduce": {"v_hat": how, "x": "median"}, "clients_per_round": None}
    whole, small = (run(compression=choice, **options) for choice in (None, "balanced"))
    start = torch.cat([value.flatten() for value in make_model().state_dict().values()])
    assert (flat(small, "x") - flat(whole, "x")).norm() < 0.2 * (flat(whole, "x") - start).norm()
    assert (flat(small, "v_hat") >= 1e-16).all()


def test_without_codecs_nothing_changes():
    assert same(run(), run(compression=fl.Compression()))


def test_a_configuration_names_codecs_and_their_options():
    up = "{x: {name: int, bits: 4, feedback: true}, v_hat: log}"
    text = f"compression={{up: {up}, down: {{x: bfloat16}}, every: {{m: 3, v_hat: 3}}}}"
    chosen = fl.Compression({"x": Int(4, feedback=True), "v_hat": Log()}, {"x": BFloat16()}, {"m": 3, "v_hat": 3})
    for override, wanted in ((text, chosen), ("compression=balanced", SHORT_FORMS["balanced"](fl.FedLALR()))):
        config = load("quickstart", [override])
        again = Config.model_validate(config.model_dump())
        for found in (config, again):
            options = Options.named(build_options(found))
            assert options.rules(fl.FedLALR()).compression == wanted
    with pytest.raises(ConfigError, match="compression"):
        load("quickstart", ["compression=3"])


@dataclass(frozen=True)
class Sign:
    """A user's own codec: the sign of every change, and their mean size."""

    feedback: bool = True

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        return count + dtype.itemsize

    def encode(self, values: Tensor, reference: Tensor | None, draw: Any) -> Tensor:
        values = values if reference is None else values - reference
        size = values.abs().mean(1, keepdim=True).contiguous()
        return torch.cat([(values > 0).to(torch.uint8), size.view(torch.uint8)], 1)

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        size = content[:, count:].clone().view(dtype)
        change = (content[:, :count].to(dtype) * 2 - 1) * size
        return change if reference is None else reference + change


def test_a_codec_of_ones_own():
    whole, parameters = run(Constant(), rounds=15), sum(p.numel() for p in make_model().parameters())
    errors = {}
    for feedback in (True, False):
        result = run(Constant(), compression=fl.Compression(up={"x": Sign(feedback)}), rounds=15)
        assert result.history[0].bytes_up == 4 * (parameters + 8)
        errors[feedback] = (flat(result, "x") - flat(whole, "x")).norm()
    assert errors[True] < errors[False] / 2


@dataclass(frozen=True)
class Wrong(fl.codecs.BFloat16):
    """A codec that states a wrong size, or decodes to one number."""

    part: str = "size"

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        return 2 * count - (self.part == "size")

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        return super().decode(content, reference, count, dtype)[:, : 1 if self.part == "decode" else None]


@pytest.mark.parametrize("part", ["size", "decode"])
def test_a_codec_that_returns_something_else_than_it_says_is_rejected(part):
    for chosen in (fl.Compression(up={"x": Wrong(part)}), fl.Compression(down={"x": Wrong(part)})):
        with pytest.raises(ValueError, match="the codec of x returned torch"):
            run(Constant(), compression=chosen)


@pytest.mark.parametrize(
    ("algorithm", "chosen", "message"),
    [
        (BEST, "blanced", "there is no compression 'blanced'.*Did you mean 'balanced'"),
        (BEST, 8, r"compression must be fl.Compression\(…\), a short form or None, not 8"),
        (BEST, {"upp": {}}, "compression has no option 'upp'; it takes up, down, every. Did you mean 'up'"),
        (BEST, {"up": {"m": "int"}}, "up names the slot 'm', but FedLALR uploads x, v_hat"),
        (BEST, {"down": {"m": "int"}}, "down names the slot 'm', but FedLALR broadcasts x, v_hat"),
        (BEST, {"every": {"m": 2}}, "every names the slot 'm'"),
        (BEST, {"every": {"x": 2}}, "x must be sent in every round, because x carries"),
        (fl.FedLALR(), {"every": {"v_hat": 3}}, "m and v_hat must be sent in the same rounds"),
        (BEST, {"every": {"v_hat": 0}}, "every of v_hat must be a whole number of at least 1"),
        (BEST, {"every": 3}, "every must be a dict"),
        (BEST, {"up": "int"}, "up must be a dict from slot to codec"),
        (BEST, {"up": {"x": "integer"}}, "up of x: there is no codec 'integer'"),
        (BEST, {"up": {"x": {"name": "int", "bit": 8}}}, "the codec 'int' has no option 'bit'; it takes bits"),
        (BEST, {"up": {"x": {"name": "bfloat16", "bits": 8}}}, "has no option 'bits'; it takes none"),
        (BEST, {"up": {"x": {"name": "int", "bits": 3}}}, "bits must be one of 8, 4, not 3"),
        (BEST, {"up": {"x": Int}}, "a codec is an object such as"),
        (BEST, {"up": {"x": "log"}}, "x of FedLALR can shrink, and Log writes only growth"),
        (BEST, {"up": {"v_hat": Int(feedback=True)}}, "v_hat of FedLALR can only grow, and the error"),
        (BEST, {"down": {"x": "log"}}, "x of FedLALR can be negative"),
        (BEST, {"down": {"v_hat": "int"}}, "FedLALR divides by v_hat or its root"),
        (fl.FedLALR(), {"up": {"m": "log"}}, "m of FedLALR can shrink"),
        (fl.FedAdam(), {"every": {"delta": 2}}, "delta must be sent in every round, because the server does not have"),
        (fl.LAFedOpt(correction="joint"), {"up": {"inverse_A": "int"}}, "divides by inverse_A or its root"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_rejected_before_the_first_round(algorithm, chosen, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(algorithm, compression=chosen)


def packed() -> None:
    pytest.importorskip("flwr")
    from fedlalr.flower import FederatedStrategy

    FederatedStrategy(make_model(), BEST, {"compression": "balanced"}, population=2, layout="packed")


def on_flower(**settings: Any) -> None:
    from fedlalr.flower.settings import read_settings

    read_settings(settings)


PRIVATE = {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}}


PROGRAMS = {
    ("compression", 'layout="packed" on Flower'): packed,
    ("personal parameters", 'buffers="recalibrate"'): partial(run, personal="2.*", buffers="recalibrate"),
    ('sampling="size"', 'weighting="samples"'): partial(run, sampling="size", weighting="samples"),
    ("Flower", 'sampling="size"'): partial(on_flower, sampling="size"),
    ("Flower", 'buffers="recalibrate"'): partial(on_flower, buffers="recalibrate"),
    ("privacy", "a slot that is reduced by its maximum"): partial(run, fl.AlignedLALR(), **PRIVATE),
    ("privacy", 'weighting="samples"'): partial(run, fl.FedAvg(), weighting="samples", **PRIVATE),
    ("privacy", "reduce"): partial(run, fl.FedAvg(), reduce={"x": "median"}, **PRIVATE),
    ("privacy", "max_norm_ratio"): partial(run, fl.FedAvg(), max_norm_ratio=3.0, **PRIVATE),
    ("privacy", 'sampling other than "uniform"'): partial(run, fl.FedAvg(), sampling="round-robin", **PRIVATE),
    ("privacy", "min_clients above 1"): partial(run, fl.FedAvg(), min_clients=2, **PRIVATE),
    ("privacy", 'buffers="recalibrate"'): partial(run, fl.FedAvg(), buffers="recalibrate", **PRIVATE),
    ("privacy on Flower", "evaluation of the clients"): partial(on_flower, holdout=0.2, **PRIVATE),
    ("privacy on Flower", "checkpoint_every above 1"): partial(on_flower, checkpoint_every=2, **PRIVATE),
    ("privacy", "asynchronous rounds"): partial(run, fl.FedAvg(), asynchronous=fl.Async(2, 2), **PRIVATE),
    ("privacy", "stragglers"): partial(run, fl.FedAvg(), stragglers=fl.Stragglers(0.2), **PRIVATE),
    ("asynchronous rounds", 'buffers="recalibrate"'): partial(run, asynchronous=fl.Async(2, 2), buffers="recalibrate"),
    ("asynchronous rounds", "reduce"): partial(run, asynchronous=fl.Async(2, 2), reduce={"x": "median"}),
    ("asynchronous rounds", "stragglers"): partial(run, asynchronous=fl.Async(2, 2), stragglers=fl.Stragglers(0.2)),
    ("Flower", "a deadline of stragglers"): partial(on_flower, stragglers={"deadline": 2.0}),
}
"""A program for every row of the table of what cannot be combined."""


@pytest.mark.parametrize("pair", COMBINATIONS, ids=" and ".join)
def test_what_cannot_be_combined_is_rejected_with_the_reason_of_the_table(pair):
    with pytest.raises(ValueError, match="cannot be combined") as raised:
        PROGRAMS[pair]()
    assert str(raised.value) == f"{pair[0]} and {pair[1]} cannot be combined: {COMBINATIONS[pair]}"
    check_combinations(pair[:1])
    check_combinations(pair[1:])


def test_the_page_has_the_tables_that_the_code_prints():
    page = (Path(__file__).parents[3] / "docs" / "compression.md").read_text(encoding="utf-8")
    assert bytes_table() in page
    assert combinations_table() in page


def test_personal_parameters_are_neither_encoded_nor_counted():
    """The residuals are of the shared coordinates, beside what stays with the client."""
    chosen = fl.Compression(up={"x": Int(8, feedback=True)}, down={"x": BFloat16()})
    plain, sent = (run(personal="2.*", holdout=0.3, compression=each) for each in (None, chosen))
    shared = sum(value.numel() for name, value in plain.state["x"].items() if not name.startswith("2."))
    saved = [sum(record.bytes_down for record in result.history) for result in (plain, sent)]
    assert saved[0] - saved[1] == 3 * 4 * shared * (8 - 2)  # rounds, clients, numbers, bytes
    for name, value in plain.client_model(1).state_dict().items():
        torch.testing.assert_close(sent.client_model(1).state_dict()[name], value, rtol=0.1, atol=0.02)


def test_numbers_for_whole_parameter_tensors_are_sent_as_they_are():
    compression = compression_for("balanced", fl.FedAdamW())
    assert set(compression.up) & set(fl.FedAdamW().slots.blocks) == set()
    with pytest.raises(ValueError, match="one number for each parameter tensor; leave it out"):
        run(fl.FedAdamW(), compression={"up": {"v": "bfloat16"}})
