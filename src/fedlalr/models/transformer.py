"""Transformers: GPT for sequences of tokens and ViT for images, both with normalisation before each layer.

    tokens or patches   x ← embedding + position
    layers ×            x ← x + attention(norm(x))
                        x ← x + W₂ gelu(W₁ norm(x))        W₁: dim → 4 dim, W₂: back
    head                linear(norm(x))

Radford et al. "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2). Dosovitskiy et al. "An Image is
Worth 16x16 Words", ICLR 2021 (ViT). Su et al. "RoFormer", 2021 (rotary positions).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedlalr.common.checks import check_choice, check_sizes
from fedlalr.common.option_types import Fraction, check_type

Positions = Literal["learned", "rotary"]


class Attention(nn.Module):
    """Multi-head self-attention on `[N, length, dim]`, by torch's fused function."""

    def __init__(self, dim: int, heads: int, *, causal: bool, rotary: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary, self.dropout = heads, causal, rotary, dropout
        self.inputs = nn.Linear(dim, 3 * dim)
        """Queries, keys and values of all heads, in this order."""
        self.outputs = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2)  # [N, heads, length, dim / heads]
            for part in self.inputs(x).chunk(3, dim=-1)
        )
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.outputs(mixed.transpose(1, 2).reshape(n, length, dim))


class Block(nn.Module):
    """One layer: attention, then two linear layers with GELU between them, each added to its input.

    With `gradient_checkpointing`, the backward pass computes the layer again instead of keeping what is inside it.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func = staticmethod(partial(checkpoint, use_reentrant=False))
    """Both names are those of Hugging Face's layers, so that a stack of clients treats them alike."""

    def __init__(self, dim: int, heads: int, *, causal: bool, rotary: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal=causal, rotary=rotary, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(self._mix), x)
        return self._mix(x)

    def _mix(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder that predicts the next token at every position. Sizes: `tiny`, `small`, `medium`, or your own.

    `tied` uses the token embedding as the head. Rotary positions have no parameters. `gradient_checkpointing` saves
    memory, and costs a third more time: the backward pass computes each layer again.

    >>> sum(p.numel() for p in GPT(vocabulary=65, length=256, dim=384, layers=6, heads=6).parameters())
    10770816
    """

    def __init__(
        self,
        vocabulary: int = 80,
        length: int = 256,
        dim: int = 384,
        layers: int = 6,
        heads: int = 6,
        *,
        positions: Positions = "learned",
        tied: bool = True,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("GPT", vocabulary=vocabulary, length=length, dim=dim, layers=layers, heads=heads)
        check_transformer("GPT", dim, heads, dropout)
        check_choice("GPT: positions", positions, ("learned", "rotary"))
        rotary = positions == "rotary"
        if rotary and dim // heads % 2:
            raise ValueError(f"GPT: rotary positions need an even number of features per head, not {dim // heads}")
        self.length = length
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = None if rotary else nn.Parameter(torch.empty(length, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(dim, heads, causal=True, rotary=rotary, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        initialise(self)
        if tied:
            self.head.weight = self.embedding.weight
        recompute(self, gradient_checkpointing)

    @classmethod
    def tiny(cls, vocabulary: int = 80, length: int = 128, **options: Any) -> Self:
        """4 layers of 128: 0.8 million parameters."""
        return cls(vocabulary, length, 128, 4, 4, **options)

    @classmethod
    def small(cls, vocabulary: int = 80, length: int = 256, **options: Any) -> Self:
        """6 layers of 384: 10.8 million parameters."""
        return cls(vocabulary, length, 384, 6, 6, **options)

    @classmethod
    def medium(cls, vocabulary: int = 80, length: int = 512, **options: Any) -> Self:
        """12 layers of 768, as in the smallest GPT-2: 85.5 million parameters and the embedding."""
        return cls(vocabulary, length, 768, 12, 12, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[N, vocabulary, length]` of the token after each position of `[N, length]`, as `cross_entropy` wants.

        The targets are the same sequence, one position later: `[N, length]`.
        """
        length = tokens.shape[1]
        if length > self.length:
            raise ValueError(f"GPT: sequences of {length} tokens are longer than its length of {self.length}")
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions[:length]
        return self.head(self.norm(self.blocks(self.dropout(x)))).transpose(1, 2)


class ViT(nn.Module):
    """A transformer over square patches of an image; the head sees the mean over all patches.

    `gradient_checkpointing` as in `GPT`.

    >>> ViT.tiny()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        patch: int = 4,
        dim: int = 192,
        layers: int = 6,
        heads: int = 3,
        *,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            "ViT", classes=classes, channels=channels, size=size, patch=patch, dim=dim, layers=layers, heads=heads
        )
        check_transformer("ViT", dim, heads, dropout)
        if size % patch:
            raise ValueError(f"ViT: images of {size} × {size} do not split into patches of {patch} × {patch}")
        self.patch = patch
        self.embedding = nn.Linear(channels * patch**2, dim)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        initialise(self)
        recompute(self, gradient_checkpointing)

    @classmethod
    def tiny(cls, classes: int = 10, channels: int = 3, size: int = 32, patch: int = 4, **options: Any) -> Self:
        """6 layers of 192: 2.7 million parameters."""
        return cls(classes, channels, size, patch, 192, 6, 3, **options)

    @classmethod
    def small(cls, classes: int = 10, channels: int = 3, size: int = 32, patch: int = 4, **options: Any) -> Self:
        """12 layers of 384: 21 million parameters."""
        return cls(classes, channels, size, patch, 384, 12, 6, **options)

    @classmethod
    def medium(cls, classes: int = 10, channels: int = 3, size: int = 32, patch: int = 4, **options: Any) -> Self:
        """12 layers of 768: 85 million parameters."""
        return cls(classes, channels, size, patch, 768, 12, 12, **options)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]` of images `[N, channels, size, size]`."""
        n, channels, height, width = images.shape
        p = self.patch
        tiles = images.view(n, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        x = self.embedding(tiles.reshape(n, -1, channels * p * p)) + self.positions
        return self.head(self.norm(self.blocks(self.dropout(x))).mean(dim=1))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on `[…, length, features]`: position t turns the pair (i, i + half) by t · 10000^(−i / half)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def initialise(model: GPT | ViT) -> None:
    """GPT-2's initial weights: normal with a deviation of 0.02, less in the layers that add to their input."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if model.positions is not None:
        nn.init.normal_(model.positions, std=0.02)
    for name, parameter in model.blocks.named_parameters():
        if name.endswith(("attention.outputs.weight", "mlp.2.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(model.blocks)))


def recompute(model: GPT | ViT, wanted: bool) -> None:
    """Let the backward pass compute each block again, which takes a third more time and far less memory."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.gradient_checkpointing = wanted


def check_transformer(name: str, dim: int, heads: int, dropout: float) -> None:
    """Reject sizes that do not fit together."""
    if dim % heads:
        raise ValueError(f"{name}: dim must be a multiple of heads, but {dim} is not a multiple of {heads}")
    check_type(f"{name}: dropout", dropout, Fraction)
