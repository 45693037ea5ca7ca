"""Two small convolutional networks: one for laptops, and one from a public benchmark of simulators."""

from __future__ import annotations

from torch import Tensor, nn

from fedlalr.common.checks import check_sizes


class CNN(nn.Module):
    """Two 5 × 5 convolutions of 16 and 32 channels, each with ReLU and 2 × 2 max-pooling, and a linear layer.

    Images are `[N, channels, size, size]`; the convolutions keep the size, so it may be as small as 4.
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        check_sizes("CNN", classes=classes, channels=channels, size=size)
        if size < 4:
            raise ValueError(f"CNN: size must be at least 4 pixels for two poolings, not {size}")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32 * (size // 4) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]`."""
        return self.head(self.features(images).flatten(1))


class DenseCNN(nn.Module):
    """The CIFAR-10 network of pfl-research's benchmark: two 3 × 3 convolutions, max-pooling and a dense layer of 128.

    `dropout=True` adds that benchmark's dropout (¼ after pooling, ½ after the dense layer). Dropout draws from torch's
    generator: repeatable on one engine, not equal across engines, and under vmap its randomness must be set.
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32, *, dropout: bool = False) -> None:
        super().__init__()
        check_sizes("DenseCNN", classes=classes, channels=channels, size=size)
        if size < 6:
            raise ValueError(f"DenseCNN: size must be at least 6 pixels for two convolutions and a pooling, not {size}")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.features_dropout = nn.Dropout(0.25) if dropout else nn.Identity()
        self.dense = nn.Linear(64 * ((size - 4) // 2) ** 2, 128)
        self.dense_dropout = nn.Dropout(0.5) if dropout else nn.Identity()
        self.head = nn.Linear(128, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]`."""
        x = self.features_dropout(self.features(images)).flatten(1)
        x = self.dense_dropout(nn.functional.relu(self.dense(x)))
        return self.head(x)
