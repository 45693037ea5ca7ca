"""Converts Flower's messages to instructions, broadcasts and replies, and back. Only here are record names known.

to a client      arrays, `fedlalr`: the instruction and the entries of `train_config`
from a client    arrays, `fedlalr`: run, round, client, contract, `metrics`: num-examples, steps, loss (not if private)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedlalr.federation.evaluation import Score
from fedlalr.federation.replies.payload import Expected, Rejected, Reply, array_from_npy, as_tensor, clean_metrics
from fedlalr.federation.round import ServerState
from fedlalr.flower.client.training import Answer
from fedlalr.flower.wire.arrays import Arrays, decode, encode
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.training.layout import Layout

FACTS, METRICS = "fedlalr", "metrics"
NPY = "numpy.ndarray"
"""Flower's name for arrays serialised as npy."""


def array_records(encoded: Mapping[str, Arrays]) -> dict[str, ArrayRecord]:
    """Arrays in Flower's records."""
    return {
        record: ArrayRecord({name: Array(array) for name, array in arrays.items()})
        for record, arrays in encoded.items()
    }


def instruct(arrays: Mapping[str, ArrayRecord], instruction: Instruction, config: ConfigRecord | None) -> RecordDict:
    """The content of a message to a client. All clients of a round share the array records."""
    facts = asdict(instruction)
    if taken := sorted(facts.keys() & (config or {}).keys()):
        raise ValueError(f"train_config contains {taken[0]!r}, a name that the instruction uses; rename it")
    return RecordDict({**arrays, FACTS: ConfigRecord({**(config or {}), **facts})})


def instruction_in(content: RecordDict) -> Instruction:
    """The instruction in a message from the server."""
    return Instruction.of(_facts(content))


def answer_content(
    answer: Answer, instruction: Instruction, layout: Layout, blocks: Collection[str], *, private: bool
) -> RecordDict:
    """The content of a client's reply. A private one has no counts and no loss, to which no noise would be added."""
    arrays = encode(answer.upload, answer.buffers, layout, instruction.layout, blocks, answer.content)
    metrics: dict[str, Any] = (
        {} if private else {"num-examples": answer.samples, "steps": answer.steps, "loss": answer.loss}
    )
    return RecordDict({**array_records(arrays), FACTS: _origin(instruction), METRICS: MetricRecord(metrics)})


def score_content(score: Score, instruction: Instruction) -> RecordDict:
    """The content of a client's reply to an evaluation: numbers only."""
    numbers = {name: value for name, value in score._asdict().items() if value is not None}
    return RecordDict({FACTS: _origin(instruction), METRICS: MetricRecord(numbers)})


def score_in(content: RecordDict, asked: Instruction) -> Score:
    """A client's score; raises `Rejected` if it is malformed or answers another instruction."""
    facts = _facts(content)
    for name in ("run", "round", "client", "contract"):
        if facts.get(name) != getattr(asked, name):
            raise Rejected(f"the reply's {name} is not that of the evaluation")
    numbers = clean_metrics(dict(content.metric_records.get(METRICS) or {}))
    loss, accuracy = numbers.get("loss"), numbers.get("accuracy")
    if not isinstance(loss, int | float):
        raise Rejected("its loss is missing or not finite")
    if accuracy is not None and not (isinstance(accuracy, int | float) and 0 <= accuracy <= 1):
        raise Rejected("its accuracy is not a number between 0 and 1")
    return Score(float(loss), None if accuracy is None else float(accuracy))


def _origin(instruction: Instruction) -> ConfigRecord:
    """Which instruction a reply answers."""
    return ConfigRecord({name: getattr(instruction, name) for name in ("run", "round", "client", "contract")})


def reply_in(content: RecordDict, expected: Expected, how: str) -> Reply:
    """A client's reply, unchecked except for its form; raises `Rejected` if it is malformed."""
    facts = _facts(content)
    metrics = content.metric_records.get(METRICS)
    if metrics is None:
        raise Rejected(f"the reply has no record {METRICS!r}")
    table, encoded = expected.table, expected.encoded
    slots, buffers = decode(
        contents_in(content), table.up, expected.layout, expected.buffers, how, table.blocks, encoded
    )
    return Reply(
        client=_fact(facts, "client", int),
        run=_fact(facts, "run", str),
        round=_fact(facts, "round", int),
        contract=_fact(facts, "contract", str),
        samples=metrics.get("num-examples"),
        steps=metrics.get("steps"),
        slots=slots,
        buffers=buffers,
        metrics=dict(metrics),
    )


def _fact(facts: Mapping[str, Any], name: str, kind: type) -> Any:
    value = facts.get(name)
    if type(value) is not kind:
        raise Rejected(f"the reply's {name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _facts(content: RecordDict) -> dict[str, Any]:
    facts = content.config_records.get(FACTS)
    if facts is None:
        raise Rejected(f"the message has no record {FACTS!r}; is the other side a fedlalr app?")
    return dict(facts)


def contents_in(content: RecordDict) -> dict[str, dict[str, bytes]]:
    """The npy bytes of every array, not parsed."""
    found: dict[str, dict[str, bytes]] = {}
    for record, arrays in content.array_records.items():
        for name, array in arrays.items():
            if array.stype != NPY:
                raise Rejected(f"{record}/{name} must be serialised as {NPY!r}, not {array.stype[:40]!r}")
            found.setdefault(record, {})[name] = array.data
    return found


def as_arrays(state: ServerState, layout: Layout) -> ArrayRecord:
    """The trained parameters and the buffers; load them with `module.load_state_dict(…, strict=False)`."""
    named = {**layout.views(state.slots.x), **state.buffers}
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in named.items()})


def with_arrays(state: ServerState, arrays: ArrayRecord, layout: Layout) -> ServerState:
    """An initial state with the parameters, and the buffers if given, of a module's state dict."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if missing := [name for name in layout.names if name not in arrays]:
        raise ValueError(f"the initial arrays have no {missing[0]!r}; give the state dict of the same module")

    def tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return as_tensor(name, array_from_npy(name, arrays[name].data, shape, dtype), shape, dtype)

    parts = [tensor(name, shapes[name], layout.dtype).reshape(-1) for name in layout.names]
    x = torch.cat(parts).to(state.slots.x.device)
    buffers = {
        name: tensor(name, like.shape, like.dtype) if name in arrays else like for name, like in state.buffers.items()
    }
    return replace(state, slots=state.slots.replace(x=x), buffers=buffers)
