"""The options that a simulation and a deployment share, and what becomes of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.checks import check_choice, check_count, check_not_negative, check_positive
from fedlalr.data.population import Clients
from fedlalr.federation.replies.reductions import SlotReduction, as_reductions
from fedlalr.federation.replies.screening import MAX_NORM_RATIO
from fedlalr.federation.round import Rules
from fedlalr.training import Epochs, Interval, Training
from fedlalr.training.interfaces import Loss
from fedlalr.training.layout import Layout
from fedlalr.training.ranks import own_gpu
from fedlalr.training.torch_state import undisturbed

LEAST_DECAY = 1e-30
"""What a decay leaves of the rate at the least: no parameter moves by it, but some methods divide by their rate."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options with the names, the meaning and the defaults that `fl.run` gives them."""

    rounds: int = 100
    clients_per_round: int | None = None
    local: Interval = Epochs(1)  # noqa: RUF009 - frozen
    batch_size: int | None = 50
    drop_last: bool = False
    lr_decay: float = 1.0
    lr_decay_every: int = 1
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    clip_norm: float | None = None
    weighting: Literal["uniform", "samples"] = "uniform"
    buffers: Literal["average", "recalibrate"] = "average"
    reduce: Mapping[str, str | SlotReduction | Mapping[str, object]] | None = None
    max_norm_ratio: float | None = MAX_NORM_RATIO
    min_clients: int = 1
    loss: Loss = nn.functional.cross_entropy
    seed: int = 0
    device: str | torch.device = "auto"
    dtype: torch.dtype | None = None
    run_dir: str | Path | None = None
    resume: bool = False
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        """NumPy's whole numbers, as a sweep over `np.arange` has them, become Python's own, and ~ the home folder."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.integer):
                object.__setattr__(self, field.name, int(value))
        if str(self.run_dir).startswith("~"):  # where no shell has done it, a folder of that name would be made
            object.__setattr__(self, "run_dir", os.path.expanduser(str(self.run_dir)))

    def check(self, model: nn.Module, algorithm: Algorithm) -> None:
        """Refuse what cannot be, one by one."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
        lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
        if lazy:
            raise ValueError(
                f"the model's {lazy[0]} has no shape before the first forward pass (a lazy module); pass a batch "
                f"through the model first, such as model(inputs[:2])"
            )
        if isinstance(algorithm, type):
            raise TypeError(
                f"algorithm is the class {algorithm.__name__}; pass an instance, such as {algorithm.__name__}()"
            )
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm must be one of fedlalr's, such as fl.FedLALR(), or a class with the same functions "
                f"(slots, init, start, step, finish, update and lr), not {algorithm!r}"
            )
        if not hasattr(self.local, "steps"):
            raise TypeError(
                f"local must be fl.Steps(K), fl.Epochs(E) or fl.LogInterval(start, base), not {self.local!r}"
            )
        check_count("rounds", self.rounds)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, " (or None for full batches)")
        if not isinstance(self.drop_last, bool):
            raise TypeError(f"drop_last must be True or False, not {self.drop_last!r}")
        check_positive("lr_decay", self.lr_decay)
        check_count("lr_decay_every", self.lr_decay_every)
        check_not_negative("weight_decay", self.weight_decay)
        check_not_negative("decoupled_weight_decay", self.decoupled_weight_decay)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        check_choice("weighting", self.weighting, ("uniform", "samples"))
        check_choice("buffers", self.buffers, ("average", "recalibrate"))
        check_count("min_clients", self.min_clients)
        if self.max_norm_ratio is not None:
            check_positive("max_norm_ratio", self.max_norm_ratio)
        check_count("checkpoint_every", self.checkpoint_every)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise TypeError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed!r}")
        check_choice("dtype", self.dtype, (None, torch.float32, torch.float64, torch.bfloat16, torch.float16))
        if self.run_dir is not None and not str(self.run_dir).strip():
            raise ValueError("run_dir is empty; name a directory, or leave it out to write nothing")
        if self.resume and self.run_dir is None:
            raise ValueError("resume=True needs run_dir, the directory of the run to go on with")

    def training(self, model: nn.Module, algorithm: Algorithm, clients: Clients) -> Training:
        """How every client trains, for a private copy of the module."""
        where = choose_device(self.device)
        with undisturbed(where):
            private, compute = private_copy(model, where, self.dtype)
        return Training(
            model=private,
            layout=Layout.of(private),
            clients=clients.to(where),
            algorithm=algorithm,
            loss=self.loss,
            local=self.local,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            weight_decay=self.weight_decay,
            decoupled_weight_decay=self.decoupled_weight_decay,
            clip_norm=self.clip_norm,
            seed=self.seed,
            device=where,
            compute=compute,
        )

    def rules(self, algorithm: Algorithm) -> Rules:
        """How the server treats the replies."""
        reductions = as_reductions(self.reduce, algorithm.slots)
        return Rules(self.weighting, self.buffers, self.min_clients, reductions, self.max_norm_ratio)

    def rate(self, algorithm: Algorithm, round: int) -> float:
        """The clients' rate in a round (from 1); what a decay leaves is never below `LEAST_DECAY`."""
        return algorithm.lr * max(self.lr_decay ** ((round - 1) // self.lr_decay_every), LEAST_DECAY)


def choose_device(device: str | torch.device) -> torch.device:
    """`"auto"` is the current CUDA device where there is one, under torchrun each process's own, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device {device!r} is none that runs here can compute on; use 'auto', 'cpu', 'cuda' or 'cuda:0'"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} was asked for, but this machine has no usable CUDA device; use device='cpu'"
        )
    return own_gpu(chosen)


def private_copy(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, torch.dtype | None]:
    """A copy of the module to train in, and the dtype to compute in where it differs from the parameters'."""
    try:
        private = copy.deepcopy(model).to(device)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise ValueError(
            "the model cannot be copied, because it keeps a tensor that was computed of its parameters, which training "
            "would not reach: compute it in forward, or set it to None if it is left from a pass; in the place of "
            "torch.nn.utils.weight_norm and spectral_norm use those of torch.nn.utils.parametrizations"
        ) from error
    if dtype in (torch.float32, torch.float64):
        # `to` would take the imaginary part away from complex buffers
        return private.double() if dtype == torch.float64 else private.float(), None
    return private, dtype
