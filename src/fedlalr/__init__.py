"""Federated optimisation with client-specific adaptive learning rates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedlalr.common.interrupts import exit_quietly_during_imports

if TYPE_CHECKING:
    from fedlalr.public import *  # noqa: F403

exit_quietly_during_imports()  # before torch, which takes seconds

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the library, and torch with it, when one of its names is first used."""
    if not name.startswith("__") or name == "__all__":
        public = import_module("fedlalr.public")
        globals().update({each: getattr(public, each) for each in getattr(public, "_NAMES", ())})  # none halfway
        if name in globals() or name == "__all__":
            return globals().get(name, public._NAMES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
