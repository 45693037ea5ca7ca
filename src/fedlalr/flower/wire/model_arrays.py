"""The server's model as Flower's arrays, under the names of the module's state dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedlalr.federation.replies.payload import array_from_npy, as_tensor
from fedlalr.federation.round import ServerState
from fedlalr.training.layout import Layout


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
