"""Checks of numbers and choices; their messages say what was given and what is allowed."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MOST = 2**31 - 1
"""The largest count that a setting can have. Products of two such counts still fit into 64 bits."""


def whole_number(name: str, value: object, least: int = 1, most: int | None = MOST, also: str = "") -> int:
    """A whole number within limits, also one of NumPy, as a Python int. `also` names what else is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}{also}, not {value!r}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}{also}, not {value!r}")
    return int(value)


def check_count(name: str, value: object, also: str = "") -> None:
    """Reject anything but a whole number from 1 to `MOST`."""
    whole_number(name, value, also=also)


def check_seed(name: str, value: object, also: str = "") -> None:
    """Reject anything but a whole number that a random generator accepts as a seed."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise TypeError(f"{name} must be a whole number from 0 to 2^63 - 1{also}, not {value!r}")


def check_flag(name: str, value: object, also: str = "") -> None:
    """Reject anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False{also}, not {value!r}")


def check_positive(name: str, value: float, also: str = "") -> None:
    """Reject anything but a finite number above zero."""
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{name} must be a finite number above 0{also}, not {_shown(value)}")


def check_not_negative(name: str, value: float, also: str = "") -> None:
    """Reject anything but a finite number of at least zero."""
    if not _is_number(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0{also}, not {_shown(value)}")


def check_fraction(name: str, value: float, also: str = "") -> None:
    """Reject anything outside [0, 1)."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1){also}, not {_shown(value)}")


def check_share(name: str, value: float, also: str = "") -> None:
    """Reject anything outside (0, 1]."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1]{also}, not {_shown(value)}")


def check_betas(name: str, betas: Sequence[float], also: str = "") -> None:
    """Reject anything but two decay rates in [0, 1)."""
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{name} must be a pair (beta1, beta2){also}, not {betas!r}")
    for symbol, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_fraction(symbol if name == "betas" else f"{symbol} of {name}", beta)


def squared(eps: float, params: Tensor) -> Tensor:
    """ε² in every coordinate, whose root is a divisor. Rejected if the parameters' precision cannot represent it."""
    least, most = torch.finfo(params.dtype).smallest_normal, torch.finfo(params.dtype).max
    if eps * eps > most:
        raise ValueError(
            f"eps is {eps!r}, and its square is too large for {params.dtype}; use at most {math.sqrt(most):.2g}"
        )
    if eps * eps < least:
        raise ValueError(
            f"eps is {eps!r}, and its square is too small for {params.dtype}, so steps might be divided by 0; "
            f"use at least {math.sqrt(least):.2g}"
        )
    return torch.full_like(params, eps * eps)


def check_sizes(owner: str, **sizes: int) -> None:
    """Reject sizes of a network, named `owner` in the message, that are not whole numbers of at least 1."""
    for name, size in sizes.items():
        check_count(f"{owner}: {name}", size)


def check_instance(name: str, value: object) -> None:
    """Reject a class in place of an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}; pass an instance, such as {value.__name__}()")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Reject a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # some integers are larger than any float


def _shown(value: object) -> str:
    """The value and, for a NumPy or torch number, how to convert it to a Python number."""
    foreign = hasattr(value, "__float__") and not isinstance(value, int | float)
    return f"{value!r}; convert it with float(value)" if foreign else repr(value)
