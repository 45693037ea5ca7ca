"""Every method of the library against its NumPy derivation: all server slots and all kept slots, after every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlalr as fl
from algorithms import derivations as d
from algorithms.numpy_federation import Batch, Federation, Kept, Method, Network, State, Vector, simulate
from closeness import TOLERANCE, difference
from fedlalr.algorithms import (
    ALGORITHMS,
    SCAFFOLD,
    Algorithm,
    AlignedLALR,
    DeltaSGD,
    DiLoCo,
    FedAdagrad,
    FedAdam,
    FedAdamW,
    FedAMS,
    FedAvg,
    FedAvgM,
    FedCM,
    FedLADA,
    FedLALR,
    FedMuon,
    FedNova,
    FedProx,
    FedYogi,
    LAFedOpt,
    LocalAdaAlter,
    LocalAdam,
    MimeLite,
    SharedAMSGrad,
    SlowMo,
)
from fedlalr.data.batches import PADDING, batches_per_pass, plan
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, ServerState, run_round
from fedlalr.federation.sampling import sample
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Training
from fedlalr.training.intervals import Interval
from fedlalr.training.layout import Layout

NETWORK = Network(features=4, hidden=5, classes=3)
SIZES = (7, 11, 5, 13, 8)
ROUNDS = 3
LR_DECAY = 0.9
WEIGHT_DECAY = 1e-3
SECOND_MOMENTS = ("v", "v_hat", "A")


@dataclass(frozen=True)
class Setting:
    """What surrounds the method in one comparison."""

    local: Interval
    batch_size: int | None = None
    clients_per_round: int = len(SIZES)
    clip_norm: float | None = None
    weighting: str = "uniform"
    seed: int = 3


SETTINGS = {
    "full_batch": Setting(fl.Steps(4)),
    "growing_interval_by_samples": Setting(fl.LogInterval(start=2, base=2.0), batch_size=4, weighting="samples"),
    "ragged_partial_clipped": Setting(fl.Epochs(2), batch_size=3, clients_per_round=3, clip_norm=1.0),
}


@dataclass(frozen=True)
class Case:
    """An algorithm of the library, its derivation, and what the derivation's server starts from beside x."""

    algorithm: Algorithm
    method: Method
    start: dict[str, float] = field(default_factory=dict)


BETAS = (0.8, 0.95)


def fedlalr(momentum: str, second_moment: str, **options: bool) -> Case:
    algorithm = FedLALR(lr=5e-3, betas=BETAS, eps=0.05, momentum=momentum, second_moment=second_moment, **options)
    moments = {"v_hat": 0.05**2} | ({"m": 0.0} if momentum == "average" else {})
    return Case(algorithm, d.fedlalr(*BETAS, momentum, second_moment, 0.05 if options else None), moments)


def aligned(align: float, keep: float, second_moment: str, corrected: bool = False) -> Case:
    own = {"align": align, "keep": keep, "second_moment": second_moment, "bias_correction": corrected}
    method = d.aligned_lalr(*BETAS, 0.05, align, keep, second_moment, corrected)
    moments = {"v_hat": 0.05**2} | ({"d": 0.0} if align else {})
    return Case(AlignedLALR(lr=5e-3, betas=BETAS, eps=0.05, **own), method, moments)


def fedadam(start_v: float, exponent: d.Exponent | None = None, **options: object) -> Case:
    algorithm = FedAdam(lr=0.1, server_lr=0.03, betas=BETAS, eps=2e-3, **options)
    return Case(algorithm, d.fedadam(0.03, BETAS, 2e-3, exponent), {"m": 0.0, "v": start_v})


def fedams(option: int, eps: float, corrected: bool = False) -> Case:
    algorithm = FedAMS(lr=0.1, server_lr=0.03, betas=BETAS, eps=eps, option=option, bias_correction=corrected)
    return Case(algorithm, d.fedams(0.03, *BETAS, eps, option, corrected), {"m": 0.0, "v": 0.0, "v_hat": 0.0})


def lafedopt(server: str, correction: str, server_lr: float) -> Case:
    own = {"server_lr": server_lr, "server_betas": (0.7, 0.9), "server_eps": 2e-3}
    algorithm = LAFedOpt(lr=5e-3, betas=BETAS, eps=1e-3, server=server, correction=correction, **own)
    adam = server == "adam"
    step = d.adam_server(server_lr, (0.7, 0.9), 2e-3) if adam else d.average_server(server_lr)
    return Case(algorithm, d.lafedopt(*BETAS, 1e-3, correction, step), {"m": 0.0, "v": 4e-6} if adam else {})


CASES: dict[str, Case] = {
    "fedlalr-average-mean": fedlalr("average", "mean"),
    "fedlalr-average-max": fedlalr("average", "max"),
    "fedlalr-restart-mean": fedlalr("restart", "mean"),
    "fedlalr-restart-max": fedlalr("restart", "max"),
    "fedlalr-bias_correction": fedlalr("average", "mean", bias_correction=True),
    "fedlalr-restart-max-bias_correction": fedlalr("restart", "max", bias_correction=True),
    "alignedlalr": aligned(0.5, 1.0, "max"),
    "alignedlalr-keep-mean": aligned(0.7, 0.6, "mean"),
    "alignedlalr-keep-max": aligned(0.0, 0.9, "max"),
    "alignedlalr-bias_correction": aligned(0.3, 0.8, "max", corrected=True),
    "fedavg": Case(FedAvg(lr=0.1), d.fedavg),
    "fedadam": fedadam(4e-6),
    "fedadam-initial_v": fedadam(1e-5, initial_v=1e-5),
    "fedadam-keras": fedadam(0.0, lambda t: t, initial_v=0.0, bias_correction=True),
    "fedadam-flower": fedadam(0.0, lambda t: t + 1, initial_v=0.0, bias_correction="flower"),
    "fedamsv1": fedams(1, 2e-5),
    "fedamsv2": fedams(2, 1e-2),
    "fedamsv2-bias_correction": fedams(2, 1e-2, corrected=True),
    "lafedopt-average-none": lafedopt("average", "none", 0.7),
    "lafedopt-average-local": lafedopt("average", "local", 40.0),
    "lafedopt-average-joint": lafedopt("average", "joint", 0.7),
    "lafedopt-adam-none": lafedopt("adam", "none", 0.02),
    "lafedopt-adam-local": lafedopt("adam", "local", 0.2),
    "lafedopt-adam-joint": lafedopt("adam", "joint", 0.02),
    "adaalter": Case(LocalAdaAlter(lr=0.2, eps=0.5, initial=0.3), d.local_adaalter(0.5), {"A": 0.3}),
    "sharedamsgrad": Case(
        SharedAMSGrad(lr=5e-3, betas=BETAS, eps=1e-2),
        d.shared_amsgrad(*BETAS),
        {"m": 0.0, "v": 0.0, "v_hat": 1e-4},
    ),
    "fedcm": Case(FedCM(lr=0.1, alpha=0.3), d.fedcm(0.3), {"direction": 0.0}),
    "slowmo": Case(SlowMo(lr=0.1, alpha=0.8, beta=0.6), d.slowmo(0.8, 0.6), {"u": 0.0}),
    "fedprox": Case(FedProx(lr=0.1, mu=0.4), d.fedprox(0.4)),
    "scaffold": Case(SCAFFOLD(lr=0.1), d.scaffold, {"c": 0.0}),
    "fednova": Case(FedNova(lr=0.1), d.fednova),
    "fedadagrad": Case(
        FedAdagrad(lr=0.1, server_lr=0.05, beta1=0.4, eps=1e-3),
        d.fedadagrad(0.05, 0.4, 1e-3),
        {"m": 0.0, "v": 1e-6},
    ),
    "fedyogi": Case(
        FedYogi(lr=0.1, server_lr=0.03, betas=BETAS, eps=2e-3),
        d.fedyogi(0.03, *BETAS, 2e-3),
        {"m": 0.0, "v": 4e-6},
    ),
    "fedavgm": Case(FedAvgM(lr=0.1, server_lr=0.8, momentum=0.6), d.fedavgm(0.8, 0.6), {"m": 0.0}),
    "fedlada": Case(
        FedLADA(lr=5e-3, betas=BETAS, eps=0.05, alpha=0.3),
        d.fedlada(*BETAS, 0.3),
        {"v_hat": 0.05**2, "g_a": 0.0},
    ),
    "localadam": Case(LocalAdam(lr=5e-3, betas=BETAS, eps=1e-3), d.local_adam(*BETAS, 1e-3)),
    "localadam-restart": Case(
        LocalAdam(lr=5e-3, betas=BETAS, eps=1e-3, moments="restart"), d.local_adam(*BETAS, 1e-3, "restart")
    ),
    "localadam-average": Case(
        LocalAdam(lr=5e-3, betas=BETAS, eps=1e-3, moments="average"),
        d.local_adam(*BETAS, 1e-3, "average"),
        {"m": 0.0, "v": 0.0, "n": 0.0},
    ),
    "diloco": Case(
        DiLoCo(lr=5e-3, betas=BETAS, eps=1e-3, server_lr=0.8, momentum=0.6),
        d.diloco(0.8, 0.6, *BETAS, 1e-3),
        {"m": 0.0},
    ),
    "fedadamw": Case(
        FedAdamW(lr=5e-3, betas=BETAS, eps=1e-3, align=0.4),
        d.fedadamw(*BETAS, 1e-3, 0.4, NETWORK.shapes),
        {"v": 0.0, "t": 0.0, "d": 0.0},
    ),
    "fedmuon": Case(
        FedMuon(lr=0.02, beta=0.7, align=0.4, vector_rate=0.3, betas=BETAS, eps=1e-3),
        d.fedmuon(0.7, 0.4, 0.3, BETAS, 1e-3, NETWORK.shapes),
        {"m": 0.0, "d": 0.0},
    ),
    "fedmuon-unaligned": Case(
        FedMuon(lr=0.02, beta=0.7, align=0.0, vector_rate=0.3, betas=BETAS, eps=1e-3),
        d.fedmuon(0.7, 0.0, 0.3, BETAS, 1e-3, NETWORK.shapes),
        {"m": 0.0},
    ),
    "fedadamw-whole": Case(
        FedAdamW(lr=5e-3, betas=BETAS, eps=1e-3, align=0.0, blocks=False),
        d.fedadamw(*BETAS, 1e-3, 0.0, None),
        {"v": 0.0, "t": 0.0},
    ),
    "mimelite": Case(MimeLite(lr=0.1, betas=BETAS), d.mimelite(BETAS), {"m": 0.0}),
    "mimelite-adam": Case(
        MimeLite(lr=0.02, betas=BETAS, eps=0.05, base="adam"), d.mimelite(BETAS, 0.05), {"m": 0.0, "v": 0.05**2}
    ),
    "deltasgd": Case(DeltaSGD(lr=0.3, gamma=1.5, delta=0.4), d.delta_sgd(1.5, 0.4)),
}


def test_every_registered_algorithm_has_a_derivation() -> None:
    assert {name.split("-")[0] for name in CASES} == set(ALGORITHMS)


def initial_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@cache
def client_data() -> list[Batch]:
    """Unequal clients with shifted inputs, so that they disagree."""
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(n, 4)) + 0.4 * i, rng.integers(0, 3, size=n)) for i, n in enumerate(SIZES)]


def tensors() -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in client_data()]


@cache
def batches(setting: Setting, number: int, client: int) -> list[Batch]:
    """A client's mini-batches of a round, cut from its data by the library's exported plan."""
    ids, sizes = torch.tensor([client]), torch.tensor([SIZES[client]])
    steps = setting.local.steps(number, batches_per_pass(sizes, setting.batch_size))
    inputs, targets = client_data()[client]
    rows = plan(setting.seed, number, ids, sizes, steps, setting.batch_size)[0].numpy()
    return [(inputs[row[row != PADDING]], targets[row[row != PADDING]]) for row in rows]


def derived(case: Case, setting: Setting) -> list[tuple[State, Kept]]:
    """The NumPy federation's history."""
    cohorts = [sample(len(SIZES), setting.clients_per_round, setting.seed, t).tolist() for t in range(1, ROUNDS + 1)]
    federation = Federation(
        network=NETWORK,
        plan=[{i: batches(setting, t, i) for i in cohort} for t, cohort in enumerate(cohorts, start=1)],
        sizes=SIZES,
        lr=case.algorithm.lr,
        lr_decay=LR_DECAY,
        weight_decay=WEIGHT_DECAY,
        clip_norm=setting.clip_norm,
        weighting=setting.weighting,
    )
    x = np.concatenate([p.detach().numpy().ravel() for p in initial_model().parameters()])
    return simulate(federation, case.method, {"x": x} | {name: np.full_like(x, v) for name, v in case.start.items()})


def played(case: Case, setting: Setting) -> list[ServerState]:
    """The library's history, round by round, on the reference engine."""
    model = initial_model()
    layout = Layout.of(model)
    training = Training(
        model=model,
        layout=layout,
        clients=as_clients(tensors()),
        algorithm=case.algorithm,
        loss=nn.functional.cross_entropy,
        local=setting.local,
        device=torch.device("cpu"),
        batch_size=setting.batch_size,
        weight_decay=WEIGHT_DECAY,
        clip_norm=setting.clip_norm,
        seed=setting.seed,
    )
    state = ServerState(0, case.algorithm.init(layout.flatten(dict(model.named_parameters()))), {})
    engine, history = ReferenceEngine(training), []
    for t in range(1, ROUNDS + 1):
        cohort = sample(len(SIZES), setting.clients_per_round, setting.seed, t)
        lr = case.algorithm.lr * LR_DECAY ** (t - 1)
        state = run_round(state, cohort, lr, engine, training, Rules(weighting=setting.weighting)).state
        history.append(state)
    return history


def relative_error(name: str, got: Vector, wanted: Vector) -> float:
    """The deviation of a slot, of a second moment by its root: a 2-norm of changes, off by no more than they are."""
    if name in SECOND_MOMENTS:
        got, wanted = np.sqrt(got), np.sqrt(wanted)
    return difference(got, wanted)


ELSEWHERE = ("growing_interval_by_samples", "ragged_partial_clipped")
"""Settings that `test_portable.py` tries with every method, each in a process with other instructions."""


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=[pytest.mark.slow] if name in ELSEWHERE else [])
        for name, setting in SETTINGS.items()
    ],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_slot_follows_the_derivation_in_every_round(case: Case, setting: Setting) -> None:
    for state, (server, kept) in zip(played(case, setting), derived(case, setting), strict=True):
        assert set(state.slots) == set(server)
        for name, wanted in server.items():
            error = relative_error(name, state.slots[name].numpy(), wanted)
            assert error <= TOLERANCE, f"server slot {name} in round {state.round} is off by {error:.2e}"
        assert set(state.kept) == set(kept)
        for client, slots in kept.items():
            for name, wanted in slots.items():
                error = relative_error(name, state.kept[client][name].numpy(), wanted)
                assert error <= TOLERANCE, f"client {client}'s {name} in round {state.round} is off by {error:.2e}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_ends_where_the_derivation_ends(case: Case) -> None:
    setting = SETTINGS["ragged_partial_clipped"]
    result = fl.run(
        initial_model(),
        tensors(),
        case.algorithm,
        rounds=ROUNDS,
        clients_per_round=setting.clients_per_round,
        local=setting.local,
        batch_size=setting.batch_size,
        schedule=fl.schedules.Exponential(LR_DECAY),
        weight_decay=WEIGHT_DECAY,
        clip_norm=setting.clip_norm,
        weighting=setting.weighting,
        seed=setting.seed,
        engine="reference",
        device="cpu",
    )
    server, _ = derived(case, setting)[-1]
    assert set(result.state) == set(server)
    for name, wanted in server.items():
        got = np.concatenate([tensor.numpy().ravel() for tensor in result.state[name].values()])
        assert relative_error(name, got, wanted) <= TOLERANCE, f"slot {name}"
    parts = NETWORK.unflatten(server["x"])
    for parameter, wanted in zip(result.model.parameters(), parts, strict=True):
        assert relative_error("x", parameter.detach().numpy(), wanted) <= TOLERANCE
