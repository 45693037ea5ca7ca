"""What happens around the algorithm in a local step: clipping and weight decay, on one client or a stack alike."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.training.work import Training


def local_step(training: Training, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
    """Clip the loss gradient, add the weight decay, then take the algorithm's own step."""
    if training.clip_norm is not None:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient = gradient * (training.clip_norm / norm.clamp(min=training.clip_norm))
    if training.weight_decay:
        gradient = gradient + training.weight_decay * client.x
    if training.decoupled_weight_decay:
        client = client.replace(x=client.x * (1 - context.lr * training.decoupled_weight_decay))
    return training.algorithm.step(client, gradient, broadcast, context)
