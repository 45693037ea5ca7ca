"""Overlapping windows of a long text as a view: windows are not stored, but cut out when they are read."""

from __future__ import annotations

import torch
from torch import Tensor


class Windows:
    """Windows of `length` consecutive characters, indexed like a tensor `[n, length]`.

    The characters are stored once, with one start per window: memory grows with the text, not with `length` times the
    text.

    >>> windows = Windows(torch.arange(10, dtype=torch.uint8), torch.tensor([0, 1, 5]), length=3)
    >>> windows[torch.tensor([2, 0])].tolist(), windows.following().tolist()
    ([[5, 6, 7], [0, 1, 2]], [3, 4, 8])
    """

    def __init__(self, characters: Tensor, starts: Tensor, length: int = 80) -> None:
        self.characters, self.starts, self.length = characters, starts, length
        self._span = torch.arange(length, device=characters.device)

    @property
    def device(self) -> torch.device:
        return self.characters.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.starts), self.length))

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return self.characters.nbytes + self.starts.nbytes

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Tensor | int | slice) -> Tensor:
        """The windows at some indices, as int64: `[b, length]` for a vector or slice, `[length]` for one index."""
        return self.characters[self.starts[index].unsqueeze(-1) + self._span].long()

    def following(self) -> Tensor:
        """The character after every window, int64 `[n]`: the target of a language model."""
        return self.characters[self.starts + self.length].long()

    def to(self, device: torch.device | str) -> Windows:
        return Windows(self.characters.to(device), self.starts.to(device), self.length)

    def __repr__(self) -> str:
        return f"Windows({len(self):,} of {self.length} characters, in {self.nbytes / 1e6:.1f} MB)"
