"""A client app with a modifier that spoils what clients send."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ConfigRecord, Context, Message

from fedlalr.flower import client_app


def misbehave(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Do what the run's configuration says for this round."""
    if "torch" in sys.modules:
        raise RuntimeError("the process of a message has imported torch")
    facts = message.content.config_records["fedlalr"]
    client, place = int(facts["client"]), int(facts["round"]) - 2
    rounds = str(context.run_config["faults"]).split(",")
    here = rounds[place].split("+") if 0 <= place < len(rounds) else []
    fault = next((one.partition(":")[2] for one in here if one.startswith(f"{client}:")), "")
    marker = Path(f"{context.run_config['marker']}-{client}")
    if fault == "raise":
        raise RuntimeError("this client is broken")
    if fault == "die":
        os._exit(3)
    if fault in ("wait", "slow"):
        marker.touch()
    while fault == "wait" and marker.exists():
        time.sleep(0.2)
    reply = call_next(message, context)
    if fault == "stale":
        reply.content["fedlalr"] = ConfigRecord({**reply.content["fedlalr"], "round": int(facts["round"]) - 1})
    elif fault in SPOILT:
        record, change = SPOILT[fault]
        reply.content[record]["3.bias"] = Array(change(np.array(reply.content[record]["3.bias"].numpy())))
    return reply


SPOILT = {
    "nan": ("m", lambda array: array * np.nan),
    "shape": ("x", lambda array: array[:1]),
    "v_hat": ("v_hat", lambda array: array * 0),
}

NODE = "faulty_app.node"
app = client_app(f"{NODE}:model", f"{NODE}:data", f"{NODE}:algorithm", f"{NODE}:settings", mods=[misbehave])
