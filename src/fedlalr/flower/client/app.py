"""`client_app`: a Flower client app from a model function, a data function and an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.data.holdout import hold_out
from fedlalr.data.population import Clients
from fedlalr.federation.client_evaluation import evaluate_client
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import NONE, Compression
from fedlalr.federation.options import Options
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.flower.client.state import KeptStore
from fedlalr.flower.client.training import train_locally
from fedlalr.flower.client_data import RemoteClients, own_data
from fedlalr.flower.settings import read_settings
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.flower.wire.records import FACTS, answer_content, broadcast_in, instruction_in, score_content
from fedlalr.training.calling import target_of
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.personal import first_kept, shared_buffers
from fedlalr.training.torch_state import get_buffers

PARTITION, STATE_FOLDER = "partition-id", "state-dir"
"""Keys of the node configuration: the client that the node serves, and the folder for the client's state."""

ModelFunction = Callable[[Context], nn.Module]
DataFunction = Callable[[Context], object]
AlgorithmOrFunction = Algorithm | Callable[[Context], Algorithm]
SettingsOrFunction = Mapping[str, Any] | Callable[[Context], Mapping[str, Any]] | None


def client_app(
    model: ModelFunction,
    data: DataFunction,
    algorithm: AlgorithmOrFunction,
    settings: SettingsOrFunction = None,
    *,
    test: DataFunction | None = None,
    mods: Sequence[Any] = (),
    state_dir: str | Path | None = None,
) -> ClientApp:
    """A client app that trains this node's client like `fl.run` would.

    model: returns the module; only its architecture and its parameters that are not trained matter, and the initial
        values of personal parameters and local buffers: seed them if all nodes should start alike.
    data: returns this node's data, in any form that `fl.run` accepts for a client, or a population of all clients.
    algorithm: the method, or a function of Flower's context that returns it.
    settings: the options of `fl.run`, or a function of the context that returns them. The server needs the same.
    test: returns samples to evaluate this node's client on, if the server requests it, in place of `holdout`.
    mods: Flower's mods, applied to training messages.
    state_dir: folder for the state that this node's client keeps between rounds; default: the node's `state-dir`, or
        the user's state folder.

    The node configuration sets the client: `flower-supernode --node-config 'partition-id=0'`.
    """

    def prepare(
        context: Context, clients: Callable[[Options, nn.Module], Clients]
    ) -> tuple[Training, Compression, bool]:
        """How this node trains, how it sends slots, and whether its replies are private."""
        options = read_settings(settings(context) if callable(settings) else settings)
        method = algorithm if isinstance(algorithm, Algorithm) else algorithm(context)
        module = model(context)
        options.check(module, method)
        if test is not None and options.holdout is not None:
            raise ValueError("the node has test samples of its own and holdout in its settings; give one of them")
        training = options.training(module, method, clients(options, module))
        return training, options.rules(method).compression, options.privacy is not None

    def receive(message: Message, context: Context) -> tuple[Instruction, Training, Compression, bool]:
        """What the server requests, and how this node trains; raises an error if they do not fit together."""
        instruction, mine = instruction_in(message.content), client_id(context)
        if instruction.client != mine:
            raise ValueError(f"the server requested client {instruction.client}, but this node serves client {mine}")

        def clients(options: Options, module: nn.Module) -> Clients:
            target = target_of(module, options.loss, options.target)
            return own_data(data(context), mine, instruction.population, target, options.collate_fn)

        training, compression, private = prepare(context, clients)
        training = replace(training, seed=instruction.seed)
        if contract(training, compression, private) != instruction.contract:
            raise ValueError(
                "this node's method, settings or module differ from the server's; use the same on both sides"
            )
        return instruction, training, compression, private

    def stored(
        instruction: Instruction, context: Context, training: Training, compression: Compression
    ) -> tuple[KeptStore, Slots]:
        """The store of this node's client, and its state for a round."""
        store = KeptStore(state_folder(context, state_dir), instruction.run, instruction.client)
        state = initial_state(training)
        first = first_kept(training, state.slots, state.buffers, compression.residuals)
        return store, store.load(instruction.kept, first)

    def sent(
        instruction: Instruction, message: Message, training: Training, names: Iterable[str], channel: Channel
    ) -> tuple[Slots, Buffers]:
        """The slots and buffers in the server's message."""
        expected, layout = shared_buffers(training, get_buffers(training.model)), training.division.shared
        slots, buffers = broadcast_in(message.content, names, channel, layout, expected, instruction.layout)
        where = training.device
        return slots.map(lambda slot: slot.to(where)), {name: buffer.to(where) for name, buffer in buffers.items()}

    app = ClientApp()

    @app.query()
    def announce(message: Message, context: Context) -> Message:
        agreed = contract(*prepare(context, lambda *_: RemoteClients(1)))
        facts = ConfigRecord({"client": client_id(context), "contract": agreed})
        return Message(RecordDict({FACTS: facts}), reply_to=message)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        instruction, training, compression, private = receive(message, context)
        channel = Channel.of(compression, training, instruction.round)
        broadcast, buffers = sent(instruction, message, training, training.algorithm.slots.down, channel)
        store, kept = stored(instruction, context, training, compression)
        if training.holdout is not None:
            training = replace(training, clients=hold_out(training.clients, training.holdout, training.seed)[0])
        answer = train_locally(instruction, training, channel, broadcast, buffers, kept)
        if answer.kept:
            store.save(instruction.round, answer.kept)
            store.forget(before=instruction.settled)
        shared, blocks = training.division.shared, training.algorithm.slots.blocks
        content = answer_content(answer, instruction, shared, blocks, private=private)
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        instruction, training, compression, _ = receive(message, context)
        if training.holdout is not None:
            tests = hold_out(training.clients, training.holdout, training.seed)[1]
        elif test is not None:
            target = target_of(training.model, training.loss, training.target)
            client, population = instruction.client, instruction.population
            tests = own_data(test(context), client, population, target, training.collate_fn).to(training.device)
        else:
            raise ValueError("this node has no test samples; give client_app test=…, or set holdout on both sides")
        plain = Channel.of(NONE, training, instruction.round)  # the new x is sent as it is
        x, buffers = sent(instruction, message, training, ("x",), plain)
        _, kept = stored(instruction, context, training, compression)
        score = evaluate_client(training, x, buffers, kept, tests, instruction.client, instruction.round)
        return Message(score_content(score, instruction), reply_to=message)

    return app


def client_id(context: Context) -> int:
    """The id of the client that a node serves."""
    given = context.node_config.get(PARTITION)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(
            f"this node's {PARTITION} is {given!r}; start it with --node-config '{PARTITION}=N', where N is its "
            f"client's id, from 0"
        )
    return given


def state_folder(context: Context, given: str | Path | None = None) -> Path:
    """The folder for the state of a node's client."""
    return Path(given or str(context.node_config.get(STATE_FOLDER, "")) or platformdirs.user_state_path("fedlalr"))
