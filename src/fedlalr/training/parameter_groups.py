"""Groups of parameters chosen by patterns of their names: which are trained, and which are decayed.

A pattern is a name with wildcards, as in file names: `head.*`, `*.bias`, `layers.[01].weight`. Tied parameters are one
tensor with several names; a pattern that matches one of them chooses the tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

Named = dict[str, tuple[str, ...]]
"""Trainable parameters: the name that a layout uses → all names, several for tied parameters."""
Patterns = str | Sequence[str]


def check_patterns(option: str, patterns: Any) -> None:
    """Reject anything but None, a pattern, or a sequence of patterns."""
    if patterns is None or isinstance(patterns, str):
        return
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise TypeError(
            f"{option} must be patterns of parameter names, such as ('head.*', '*.bias'), or None, not {patterns!r}"
        )


def trainable_parameters(model: nn.Module) -> Named:
    """The parameters that require a gradient."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return {each[0]: tuple(each) for each in names.values()}


def matching(option: str, patterns: Patterns, named: Named) -> Named:
    """The parameters with a name that matches a pattern; a pattern that matches none is rejected."""
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(_matches(names, (pattern,)) for names in named.values()):
            raise ValueError(
                f"{option} has the pattern {pattern!r}, which matches no trainable parameter; {_near(pattern, named)}"
            )
    return {name: names for name, names in named.items() if _matches(names, patterns)}


def freeze_others(model: nn.Module, patterns: Patterns) -> None:
    """Train only the parameters that match a pattern, of those that require a gradient."""
    named = trainable_parameters(model)
    parameters = dict(model.named_parameters())
    for name in named.keys() - matching("trainable", patterns, named).keys():
        parameters[name].requires_grad_(False)


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _near(pattern: str, named: Mapping[str, Sequence[str]]) -> str:
    names = [name for names in named.values() for name in names]
    close = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4)
    more = "" if len(names) <= 3 or close else ", …"
    return f"{'close names' if close else 'trainable parameters'} are {', '.join(close or names[:3] or ['none'])}{more}"
