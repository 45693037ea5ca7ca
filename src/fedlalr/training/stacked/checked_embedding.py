"""An embedding that cannot read another client's rows.

Under vmap the tables of a stack of clients become one long table, and an index beyond a client's own table would read
its neighbour's instead of raising. Here such an index gives NaN, so that the client's reply is rejected and no other
client is affected.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CheckedEmbedding(nn.Embedding):
    """Stands in for an `nn.Embedding`."""

    def __call__(self, input: Tensor) -> Tensor:  # without hooks: one of Hugging Face's cannot run inside vmap
        return self.forward(input)

    def forward(self, input: Tensor) -> Tensor:
        inside = (input >= 0) & (input < self.num_embeddings)
        rows = nn.functional.embedding(input.where(inside, 0), self.weight)
        if self.padding_idx is not None:  # torch would skip one row of the long table, not one of each client
            rows = torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return torch.where(inside.unsqueeze(-1), rows, float("nan"))


def checked_embedding(layer: nn.Module) -> type[nn.Module] | None:
    """The class that stands in for a stock embedding; None for other layers, which vmap batches as they are."""
    is_plain = type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq
    return CheckedEmbedding if is_plain else None
