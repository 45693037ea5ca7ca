"""A node's relay: hands a message to the node's trainer, and starts the trainer if there is none.

Flower starts a process for every message. This module is what runs there, so it must not import torch. The trainer is
another process (`trainer.py`), which stays: it has imported torch and the app, and keeps the model and the data.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedlalr.flower.client.frames import Frame
from fedlalr.flower.client.named import Names

log = logging.getLogger("flwr.fedlalr")

WARM = "warm"
"""Key of the node configuration: `warm=false` trains in the process that Flower starts for each message."""
_STATE = "fedlalr.app"
"""The record in the node's state with the digest of the app that a run started with."""


class Relay:
    """Answers messages with the node's trainer."""

    def __init__(self, names: Names, state_dir: str | Path | None = None) -> None:
        self.names, self.state_dir = names, None if state_dir is None else str(state_dir)

    def answer(self, message: Message, context: Context) -> RecordDict:
        """The content of the reply to a message."""
        kind = message.metadata.message_type
        if not stays_warm(context):
            from fedlalr.flower.client.node import NodeClient

            client = NodeClient(**self.names.load(), state_dir=self.state_dir)
            return client.answer(kind, message.content, context)
        from fedlalr.flower.client.station import Station  # which only Linux has

        digest = self.names.digest(context)
        _check_unchanged(context, digest)
        with Station(context.node_id, time.monotonic() + message.metadata.ttl) as station:
            found = station.ask(self._setup(digest), Frame(kind, "", message.content, context))
        assert found.context is not None
        context.state = found.context.state
        context.state[_STATE] = ConfigRecord({"run": str(context.run_id), "digest": digest})
        return found.content

    def _setup(self, digest: str) -> dict[str, Any]:
        """What a trainer needs to start."""
        return {"names": asdict(self.names), "state_dir": self.state_dir, "digest": digest, "path": sys.path}


def stays_warm(context: Context) -> bool:
    """Whether this node has a trainer: on Linux, unless its configuration or Flower's options exclude it."""
    if sys.platform != "linux":
        log.info("nodes stay warm only on Linux; this one trains in the message's process")
        return False
    if "--allow-runtime-dependency-installation" in sys.argv:  # Flower removes what it installed after each message
        log.info("with runtime dependency installation, this node trains in the message's process")
        return False
    return bool(context.node_config.get(WARM, True))


def _check_unchanged(context: Context, digest: str) -> None:
    """Reject an app that changed during a run: the server could not know what its client trained."""
    started = context.state.config_records.get(_STATE)
    if started is not None and started["run"] == str(context.run_id) and started["digest"] != digest:
        raise RuntimeError(
            "the app's files or this node's configuration changed during the run; restore them, or start a new run"
        )
