"""`client_app`: a Flower client app from a model function, a data function and an algorithm.

Imports neither torch nor the library: with names in place of functions, only the node's trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlalr.flower.client.named import Names
from fedlalr.flower.client.relay import Relay

if TYPE_CHECKING:
    from fedlalr.algorithms.slots import Algorithm
    from fedlalr.flower.client.node import DataFunction, ModelFunction


def client_app(
    model: ModelFunction | str,
    data: DataFunction | str,
    algorithm: Algorithm | Callable[[Context], Algorithm] | str,
    settings: Mapping[str, Any] | Callable[[Context], Mapping[str, Any]] | str | None = None,
    *,
    test: DataFunction | str | None = None,
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

    Give names in place of objects, such as `"my_app.task:model"`, and the node stays warm: a trainer process imports
    them once and serves all messages of the run.

    The node configuration sets the client: `flower-supernode --node-config 'partition-id=0'`.
    """
    given = {"model": model, "data": data, "algorithm": algorithm, "settings": settings, "test": test}
    if any(isinstance(value, str) for value in given.values()):
        answer = Relay(Names(**given), state_dir).answer  # type: ignore[arg-type]
    else:
        from fedlalr.flower.client.node import NodeClient

        client = NodeClient(**given, state_dir=state_dir)  # type: ignore[arg-type]

        def answer(message: Message, context: Context) -> Any:
            return client.answer(message.metadata.message_type, message.content, context)

    def reply(message: Message, context: Context) -> Message:
        return Message(answer(message, context), reply_to=message)

    app = ClientApp()
    app.query()(reply)
    app.train(mods=list(mods))(reply)
    app.evaluate()(reply)
    return app
