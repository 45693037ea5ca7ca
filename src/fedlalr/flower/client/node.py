"""What a node does with a message: announce its client, train it, evaluate it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import platformdirs
import torch
from flwr.app import ConfigRecord, Context, MessageType, RecordDict
from torch import nn

from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.data.holdout import hold_out
from fedlalr.data.population import Clients
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import NONE, Compression
from fedlalr.federation.evaluation import evaluate_client
from fedlalr.federation.options import Options
from fedlalr.federation.replies.reductions import clip
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.flower.client.state import KeptStore
from fedlalr.flower.client.training import CHANGE, train_locally
from fedlalr.flower.client_data import RemoteClients, own_data
from fedlalr.flower.settings import read_settings
from fedlalr.flower.wire.arrays import broadcast_from
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.flower.wire.records import FACTS, answer_content, contents_in, instruction_in, score_content
from fedlalr.training.calling import target_of
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.personal import first_kept, shared_buffers, shared_of, with_shared
from fedlalr.training.torch_state import get_buffers

PARTITION, STATE_FOLDER = "partition-id", "state-dir"
"""Keys of the node configuration: the client that the node serves, and the folder for the client's state."""

ModelFunction = Callable[[Context], nn.Module]
DataFunction = Callable[[Context], object]


@dataclass(frozen=True)
class NodeClient:
    """The client of a node, built from the arguments of `client_app`."""

    model: ModelFunction
    data: DataFunction
    algorithm: Algorithm | Callable[[Context], Algorithm]
    settings: Mapping[str, Any] | Callable[[Context], Mapping[str, Any]] | None = None
    test: DataFunction | None = None
    state_dir: str | Path | None = None

    def answer(self, kind: str, content: RecordDict, context: Context) -> RecordDict:
        """The content of the reply to a message of one of Flower's types."""
        if kind == MessageType.QUERY:
            return self._announce(context)
        instruction, mine = instruction_in(content), client_id(context)
        if instruction.client != mine:
            raise ValueError(f"the server requested client {instruction.client}, but this node serves client {mine}")
        work = self._train if kind == MessageType.TRAIN else self._evaluate
        return work(instruction, content, context)

    def _announce(self, context: Context) -> RecordDict:
        agreed = contract(*self._prepare(context, lambda *_: cast(Clients, RemoteClients(1))))
        return RecordDict({FACTS: ConfigRecord({"client": client_id(context), "contract": agreed})})

    def _train(self, instruction: Instruction, content: RecordDict, context: Context) -> RecordDict:
        training, compression, private = self._agreed(instruction, context)
        channel = Channel.of(compression, training, instruction.round)
        broadcast, buffers = _sent(instruction, content, training, training.algorithm.slots.down, channel)
        store, kept = self._stored(instruction, context, training, compression)
        if training.holdout is not None:
            training = replace(training, clients=hold_out(training.clients, training.holdout, training.seed)[0])
        answer = train_locally(instruction, training, channel, broadcast, buffers, kept)
        if answer.kept:
            store.save(instruction.round, answer.kept)
            store.forget(before=instruction.settled)
        shared, blocks = training.division.shared, training.algorithm.slots.blocks
        return answer_content(answer, instruction, shared, blocks, private=private)

    def _evaluate(self, instruction: Instruction, content: RecordDict, context: Context) -> RecordDict:
        training, compression, _ = self._agreed(instruction, context)
        if training.holdout is not None:
            tests = hold_out(training.clients, training.holdout, training.seed)[1]
        elif self.test is not None:
            target = target_of(training.model, training.loss, training.target)
            client, population = instruction.client, instruction.population
            tests = own_data(self.test(context), client, population, target, training.collate_fn).to(training.device)
        else:
            raise ValueError("this node has no test samples; give client_app test=…, or set holdout on both sides")
        plain = Channel.of(NONE, training, instruction.round)  # the new x is sent as it is
        x, buffers = _sent(instruction, content, training, ("x",), plain)
        _, kept = self._stored(instruction, context, training, compression)
        score = evaluate_client(training, x, buffers, kept, tests, instruction.client, instruction.round)
        return score_content(score, instruction)

    def _agreed(self, instruction: Instruction, context: Context) -> tuple[Training, Compression, bool]:
        """How this node trains, how it sends slots, and whether its replies are private; raises an error if the server
        requests something else."""

        def clients(options: Options, module: nn.Module) -> Clients:
            target = target_of(module, options.loss, options.target)
            data = self.data(context)
            return own_data(data, instruction.client, instruction.population, target, options.collate_fn)

        training, compression, private = self._prepare(context, clients)
        training = replace(training, seed=instruction.seed)
        if contract(training, compression, private) != instruction.contract:
            raise ValueError(
                "this node's method, settings or module differ from the server's; use the same on both sides"
            )
        return training, compression, private

    def _prepare(
        self, context: Context, clients: Callable[[Options, nn.Module], Clients]
    ) -> tuple[Training, Compression, bool]:
        options = read_settings(self.settings(context) if callable(self.settings) else self.settings)
        method = self.algorithm if isinstance(self.algorithm, Algorithm) else self.algorithm(context)
        module = self.model(context)
        options.check(module, method)
        if self.test is not None and options.holdout is not None:
            raise ValueError("the node has test samples of its own and holdout in its settings; give one of them")
        training = options.training(module, method, clients(options, module))
        return training, options.rules(method).compression, options.privacy is not None

    def _stored(
        self, instruction: Instruction, context: Context, training: Training, compression: Compression
    ) -> tuple[KeptStore, Slots]:
        """The store of this node's client, and its state for a round. A kept slot that follows an upload has changed by
        what the server took of it."""
        configured = str(context.node_config.get(STATE_FOLDER, ""))
        folder = self.state_dir or configured or platformdirs.user_state_path("fedlalr")
        store = KeptStore(folder, instruction.run, instruction.client)
        state = initial_state(training)
        first = first_kept(training, state.slots, state.buffers, compression.residuals)
        if training.algorithm.slots.follows is None:
            return store, store.load(instruction.kept, first)
        name, _ = training.algorithm.slots.follows
        nothing = torch.zeros_like(shared_of(training, first, name))
        found = store.load(instruction.kept, first.replace(**{CHANGE + name: nothing}))
        change = clip(found[CHANGE + name][None], None, [instruction.taken])[0]
        return store, with_shared(training, found.only(*first), name, shared_of(training, found, name) + change)


def _sent(
    instruction: Instruction, content: RecordDict, training: Training, names: Iterable[str], channel: Channel
) -> tuple[Slots, Buffers]:
    """The slots and buffers in the server's message."""
    expected, layout = shared_buffers(training, get_buffers(training.model)), training.division.shared
    slots, buffers = broadcast_from(contents_in(content), names, channel, layout, expected, instruction.layout)
    where = training.device
    return slots.map(lambda slot: slot.to(where)), {name: buffer.to(where) for name, buffer in buffers.items()}


def client_id(context: Context) -> int:
    """The id of the client that a node serves."""
    given = context.node_config.get(PARTITION)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(
            f"this node's {PARTITION} is {given!r}; start it with --node-config '{PARTITION}=N', where N is its "
            f"client's id, from 0"
        )
    return given
