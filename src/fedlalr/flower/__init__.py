"""The library's methods on Flower: a strategy for the server app, and a client app."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlalr.flower.client.app import client_app
    from fedlalr.flower.server.strategy import FederatedStrategy

__all__ = ["FederatedStrategy", "client_app"]

_HOMES = {"FederatedStrategy": "fedlalr.flower.server.strategy", "client_app": "fedlalr.flower.client.app"}


def __getattr__(name: str) -> Any:
    """Import Flower only when it is needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise ImportError("fedlalr.flower needs Flower: pip install 'fedlalr[flower]'") from error
