"""The options of each figure: which settings and methods it accepts, and why no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.common.named import check_known
from fedlalr.config import ConfigError
from fedlalr.config.errors import as_config_errors, listed
from fedlalr.config.overrides import flat, parse_overrides
from fedlalr.config.schema import check_method
from fedlalr.paper.plans import HOW_RUN, Beside, key_of

_DEALT = ("data.name", "partition.scheme", "partition.alpha")
SETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("heterogeneity", "cifar", "shakespeare", "choices", "variants"), _DEALT),
    "scalability": (*_DEALT, "clients_per_round", "rounds"),
    "interval": (*_DEALT, "local"),
    "trajectory": (*_DEALT, "trajectory"),
}
"""Settings that a figure sets for all of its runs, so that another value would be ignored."""
COMPARES: Mapping[str, tuple[str, ...]] = {
    "choices": ("buffers", "clip_norm", "weighting", "model.norm", "local"),
    "variants": ("methods.fedlalr.momentum", "methods.fedlalr.second_moment"),
}
"""Settings that differ between the lines of a figure, so that a common value would make its labels wrong."""
TAKES: Mapping[str, tuple[str, ...]] = {"heterogeneity": ("data", "partition", "seed"), "speedup": ()}
"""The settings of figures that train nothing; the others accept every setting."""

FEDLALR_ALONE = ("interval", "trajectory", "choices", "variants")
SIX_METHODS = ("cifar", "shakespeare", "scalability")


def figures_for(names: Sequence[str], overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The figures that accept these settings, and a sentence for each skipped one if there are several.

    Raises `ConfigError` if a setting would be ignored or would make the labels of the only figure wrong.
    """
    left_out: dict[str, str] = {}
    for text, figure in product(overrides, names):
        for key in flat(parse_overrides([text])):
            if own := _clash(key, SETS.get(figure, ())):
                raise _unusable(text, f"the figure {figure} sets {own} itself. {_instead(figure, own, names)}")
            if own := _clash(key, COMPARES.get(figure, ())):
                why = f"{figure} compares runs that differ in {own}"
                if len(names) == 1:
                    raise _unusable(text, f"the figure {why}. {_instead(figure, own, names)}")
                left_out.setdefault(figure, f"{figure} is skipped because of {text}: {why}.")
            if len(names) == 1 and not takes(figure, key):
                allowed = f"only settings of {listed(TAKES[figure])}" if TAKES[figure] else "no settings"
                raise _unusable(text, f"the figure {figure} trains no network and takes {allowed}.")
    return [name for name in names if name not in left_out], list(left_out.values())


def takes(figure: str, key: str) -> bool:
    """Whether a figure uses a setting.

    >>> takes("heterogeneity", "partition.clients"), takes("heterogeneity", "rounds"), takes("cifar", "rounds")
    (True, False, True)
    """
    return figure not in TAKES or key in HOW_RUN or key.partition(".")[0] in TAKES[figure]


def check_methods(given: str | None, figures: Sequence[str]) -> Sequence[str]:
    """The methods to run; a single figure must have runs of all of them."""
    names = [name.strip() for name in given.split(",")] if given else list(PAPER_METHODS)
    for name in names:
        with as_config_errors(ValueError):
            check_known("the paper has no method", name, PAPER_METHODS)
    if given and len(figures) == 1:
        (figure,) = figures
        if figure in FEDLALR_ALONE and set(names) != {"fedlalr"}:
            raise ConfigError(
                f"{figure} has runs of fedlalr alone, so --methods {given} cannot be used; "
                f"other methods are in {listed(SIX_METHODS)}."
            )
        if figure not in (*FEDLALR_ALONE, *SIX_METHODS):
            raise ConfigError(f"{figure} trains no method, so --methods {given} cannot be used.")
    return names


def check_beside(texts: Sequence[str], figures: Sequence[str]) -> tuple[Beside, ...]:
    """Methods with other settings to show beside the methods as printed, on figures that show all methods."""
    if texts and not set(figures) & set(SIX_METHODS):
        raise ConfigError(
            f"{listed(figures)} does not show the methods side by side, so --beside {texts[0]} cannot be used; "
            f"use it with {listed(SIX_METHODS)}."
        )
    return tuple(map(parse_beside, texts))


def parse_beside(text: str) -> Beside:
    """
    >>> parse_beside("fedadam:server_lr=0.1,lr=0.03")
    Beside(method='fedadam', settings=(('server_lr', 0.1), ('lr', 0.03)))
    >>> parse_beside("fedadam:betas=[0.9,0.999],lr=0.03").label
    'FedAdam, betas [0.9, 0.999], lr 0.03'
    """
    method, _, settings = text.partition(":")
    check_methods(method, SIX_METHODS)
    given = parse_overrides(filter(None, re.split(r",(?![^\[]*\])", settings)))  # at commas outside brackets
    if not given:
        raise ConfigError(f"--beside {text!r} changes nothing; write --beside {method}:lr=0.1")
    with as_config_errors(ValueError, TypeError):
        check_method(method, given)
    return Beside(method, tuple(given.items()))


def split_device(overrides: Sequence[str], option: str) -> tuple[str, tuple[str, ...]]:
    """The device, given as an option or as a setting, and the other settings.

    >>> split_device(["device=cuda", "rounds=3"], "auto")
    ('cuda', ('rounds=3',))
    """
    given = [text for text in overrides if key_of(text) == "device"]
    devices = list(
        dict.fromkeys([*([option] if option != "auto" else []), *(t.partition("=")[2].strip() for t in given)])
    )
    if len(devices) > 1:
        raise ConfigError(f"two devices were given, {' and '.join(devices)}; give one")
    return (devices or ["auto"])[0], tuple(text for text in overrides if text not in given)


def _clash(key: str, own: Sequence[str]) -> str | None:
    """The figure's own setting that a key equals, is part of, or contains."""
    return next((one for one in own if f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.")), None)


def _unusable(override: str, why: str) -> ConfigError:
    return ConfigError(f"{override!r} cannot be used: {why}")


def _instead(figure: str, own: str, names: Sequence[str]) -> str:
    others = "Make the other figures one by one" if len(names) > 1 else "Leave it out, choose another figure"
    preset = "shakespeare" if figure == "shakespeare" else "cifar10"
    if own in ("data.name", "trajectory"):
        return f"{others}, or run it by itself: fedlalr run {preset} {own}=…"
    varied = "local.steps" if own == "local" else own
    return f"{others}, or compare values of it: fedlalr compare {preset} --vary {varied}=A,B"
