"""Checks of numbers and choices; their messages say what was given and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

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
        whole_number(f"{owner}: {name}", size)


def check_instance(name: str, value: object) -> None:
    """Reject a class in place of an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}; pass an instance, such as {value.__name__}()")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Reject a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def takes(function: Callable[..., Any], count: int, *, unknown: bool) -> bool:
    """Whether a function can be called with this many arguments; `unknown` for a built-in without a signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return unknown
    return True


def check_takes(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Reject a function that cannot be called with these arguments."""
    if not takes(function, len(arguments), unknown=True):
        raise TypeError(
            f"{name} must be a function of ({', '.join(arguments)}), but yours takes {inspect.signature(function)}"
        )
