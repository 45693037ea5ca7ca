"""The options of `fl.run` on Flower: the simulator, the server and the nodes share one table of settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from fedlalr.federation.combinations import FLOWER, PRIVATE_FLOWER, check_combinations, features_of
from fedlalr.federation.options import Options

OWN_ARGUMENTS = ("test", "metrics", "client_tests", "observers")
"""Options that are arguments of the strategy instead, since they are objects on the server."""
SIMULATOR_ONLY = ("engine", "debug", "progress", "speeds")


def settings_names() -> list[str]:
    """The options that a table of settings may have."""
    return [each.name for each in fields(Options) if each.name not in (*OWN_ARGUMENTS, *SIMULATOR_ONLY)]


def read_settings(given: Mapping[str, Any] | None, features: Collection[str] = (), **own: Any) -> Options:
    """The options in a table of settings; names and values that Flower does not support are rejected.

    A node uses the training options, the server uses the others. Both need the same table: the server rejects replies
    of a node that trained with other settings. `features` are chosen outside the table, and exclude others.
    """
    options = replace(Options.named(given or {}, settings_names(), "Flower"), **own)
    private = {PRIVATE_FLOWER} if options.privacy is not None else set()
    check_combinations(features_of(options) | {FLOWER, *private, *features})
    return options
