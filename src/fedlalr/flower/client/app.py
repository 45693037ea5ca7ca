"""`client_app`: a Flower client app from a model function, a data function and an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.data.population import Clients
from fedlalr.federation.options import Options
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.flower.client.state import KeptStore
from fedlalr.flower.client.training import train_locally
from fedlalr.flower.client_data import RemoteClients, own_data
from fedlalr.flower.settings import read_settings
from fedlalr.flower.wire.records import FACTS, answer_content, broadcast_in, instruction_in
from fedlalr.training.calling import target_of
from fedlalr.training.interfaces import Training
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
    mods: Sequence[Any] = (),
    state_dir: str | Path | None = None,
) -> ClientApp:
    """A client app that trains this node's client like `fl.run` would.

    model: returns the module; only its architecture and its parameters that are not trained matter.
    data: returns this node's data, in any form that `fl.run` accepts for a client, or a population of all clients.
    algorithm: the method, or a function of Flower's context that returns it.
    settings: the options of `fl.run`, or a function of the context that returns them. The server needs the same.
    mods: Flower's mods, applied to training messages.
    state_dir: folder for the state that this node's client keeps between rounds; default: the node's `state-dir`, or
        the user's state folder.

    The node configuration sets the client: `flower-supernode --node-config 'partition-id=0'`.
    """

    def prepare(context: Context, clients: Callable[[Options, nn.Module], Clients]) -> Training:
        options = read_settings(settings(context) if callable(settings) else settings)
        method = algorithm if isinstance(algorithm, Algorithm) else algorithm(context)
        module = model(context)
        options.check(module, method)
        return options.training(module, method, clients(options, module))

    app = ClientApp()

    @app.query()
    def announce(message: Message, context: Context) -> Message:
        training = prepare(context, lambda *_: RemoteClients(1))
        facts = ConfigRecord({"client": client_id(context), "contract": contract(training)})
        return Message(RecordDict({FACTS: facts}), reply_to=message)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        instruction = instruction_in(message.content)
        mine = client_id(context)
        if instruction.client != mine:
            raise ValueError(f"the server requested client {instruction.client}, but this node serves client {mine}")

        def clients(options: Options, module: nn.Module) -> Clients:
            target = target_of(module, options.loss, options.target)
            return own_data(data(context), mine, instruction.population, target, options.collate_fn)

        training = prepare(context, clients)
        training = replace(training, seed=instruction.seed)
        agreed = contract(training)
        if agreed != instruction.contract:
            raise ValueError(
                "this node's method, settings or module differ from the server's; use the same on both sides"
            )
        layout, table = training.layout, training.algorithm.slots
        broadcast, buffers = broadcast_in(
            message.content, table.down, layout, get_buffers(training.model), instruction.layout
        )
        store = KeptStore(state_folder(context, state_dir), instruction.run, mine)
        kept = store.load(instruction.kept, table.kept, broadcast.x)
        answer = train_locally(instruction, training, broadcast, buffers, kept)
        if table.kept:
            store.save(instruction.round, answer.kept)
            store.forget(before=instruction.settled)
        return Message(answer_content(answer, instruction, agreed, layout), reply_to=message)

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
