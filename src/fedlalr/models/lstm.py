"""The stacked LSTM for Shakespeare (McMahan et al., AISTATS 2017; LEAF): characters in, the next character out.

    embedding 80 → 8, two LSTM layers of 100, the last step → linear 80

torch's fused LSTM is fastest for one client, but `torch.func.vmap` cannot batch it: a forward pass raises, and
`vmap(grad(...))` on a CPU runs the clients one after another. With `fused = False` (in the constructor or set later,
with the same parameters) the steps are plain matrix products, which vmap batches over clients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlalr.common.checks import check_sizes


class CharLSTM(nn.Module):
    """133,520 parameters. The FedLALR paper prints no sizes; these are those of FedDyn's code.

    >>> sum(p.numel() for p in CharLSTM().parameters())
    133520
    """

    def __init__(
        self, vocabulary: int = 80, embedding: int = 8, hidden: int = 100, layers: int = 2, *, fused: bool = True
    ) -> None:
        super().__init__()
        check_sizes("CharLSTM", vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
        self.fused = fused
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits `[N, vocabulary]` of the character after each window `[N, length]` of character numbers."""
        x = self.embedding(characters)
        outputs = self.lstm(x)[0] if self.fused else self._by_steps(x)
        return self.head(outputs[:, -1])

    def _by_steps(self, x: Tensor) -> Tensor:
        """The result of `self.lstm`, in operations that vmap supports; `[N, length, features]` in and out."""
        for layer in range(self.lstm.num_layers):
            weight_ih, weight_hh, bias_ih, bias_hh = (
                getattr(self.lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            from_input = x @ weight_ih.mT + (bias_ih + bias_hh)
            h = c = torch.zeros_like(from_input[:, 0, : self.lstm.hidden_size])
            outputs = []
            for gates in from_input.unbind(dim=1):
                i, f, g, o = (gates + h @ weight_hh.mT).chunk(4, dim=-1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            x = torch.stack(outputs, dim=1)
        return x
