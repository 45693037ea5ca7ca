"""Checks of numbers and choices; messages say what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_positive(name: str, value: float) -> None:
    """Reject anything but a finite number above zero."""
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{name} must be a finite number above 0, not {_shown(value)}")


def check_not_negative(name: str, value: float) -> None:
    """Reject anything but a finite number of at least zero."""
    if not _is_number(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, not {_shown(value)}")


def check_fraction(name: str, value: float) -> None:
    """Reject anything outside [0, 1)."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), not {_shown(value)}")


def check_share(name: str, value: float) -> None:
    """Reject anything outside (0, 1]."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], not {_shown(value)}")


def check_betas(betas: Sequence[float], name: str = "betas") -> None:
    """Reject anything but two decay rates in [0, 1)."""
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{name} must be a pair (beta1, beta2), not {betas!r}")
    for symbol, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_fraction(symbol if name == "betas" else f"{symbol} of {name}", beta)


def squared(eps: float, params: Tensor) -> Tensor:
    """ε² in every coordinate, whose root is a divisor. Rejected if the parameters' precision cannot represent it."""
    least = torch.finfo(params.dtype).smallest_normal
    if eps * eps < least:
        raise ValueError(
            f"eps is {eps!r}, and its square is too small for {params.dtype}, so steps might be divided by 0; "
            f"use at least {math.sqrt(least):.2g}"
        )
    return torch.full_like(params, eps * eps)


def check_count(name: str, value: object, also: str = "") -> None:
    """Reject anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1{also}, not {value!r}")


def check_sizes(owner: str, **sizes: int) -> None:
    """Reject sizes of a network, named `owner` in the message, that are not whole numbers of at least 1."""
    for name, size in sizes.items():
        check_count(f"{owner}: {name}", size)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Reject a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    """The value and, for a number of NumPy or torch, how to convert it to one of Python."""
    foreign = hasattr(value, "__float__") and not isinstance(value, int | float)
    return f"{value!r}; convert it with float(value)" if foreign else repr(value)
