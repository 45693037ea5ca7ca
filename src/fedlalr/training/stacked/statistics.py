"""Normalisation statistics of one model on each client's own data, for many clients at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.data.population import Population
from fedlalr.data.trees import device_of, reshaped, rows
from fedlalr.training.engines.reference import without_a_single
from fedlalr.training.interfaces import Buffers, Training, joined
from fedlalr.training.stacked.forms.convmixer import ConvMixerForm
from fedlalr.training.stacked.vmap import VmapForward


def stacked_statistics(
    forward: VmapForward | ConvMixerForm, training: Training, x: Tensor, buffers: Buffers, clients: Tensor
) -> Buffers:
    """The buffers `[C, …]` after one pass over each client's samples in order, averaged over its batches."""
    pool, batch_size = training.clients, training.batch_size or 1000
    assert isinstance(pool, Population)
    sizes = without_a_single(pool.sizes[clients], batch_size)
    batches = (sizes + batch_size - 1) // batch_size
    order = batches.argsort(descending=True, stable=True)
    clients, sizes, batches = clients[order], sizes[order], batches[order]
    state = {name: buffer.expand(len(clients), *buffer.shape).clone() for name, buffer in buffers.items()}
    for name, start in forward.fresh_statistics().items():
        state[name].fill_(start)
    parameters = training.layout.views(x)
    finished: list[Buffers] = []
    for k in range(int(batches[0])):
        active = int((batches > k).sum())
        if active < len(next(iter(state.values()))):
            finished.append({name: buffer[active:] for name, buffer in state.items()})
            state = {name: buffer[:active] for name, buffer in state.items()}
        width = min(batch_size, int(sizes[:active].max()) - k * batch_size)
        positions = k * batch_size + torch.arange(width, device="cpu").expand(active, -1)
        real = positions < sizes[:active, None]
        index = pool.rows(clients[:active], torch.where(real, positions, 0).to(device_of(pool.inputs)))
        inputs = rows(pool.inputs, index.reshape(-1))
        inputs = inputs if pool.transform is None else pool.transform.test(inputs)
        mask = None if real.all() else real.to(device_of(inputs))
        state = forward.statistics(parameters, state, reshaped(inputs, index.shape), mask, seen=k)
    back, whole = order.argsort(), joined([state, *reversed(finished)])
    return {name: buffer[back.to(buffer.device)] for name, buffer in whole.items()}
