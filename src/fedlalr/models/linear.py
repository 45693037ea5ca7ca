"""The smallest networks: logistic regression and a multilayer perceptron. Both flatten their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedlalr.common.checks import check_sizes


class Logistic(nn.Module):
    """One linear layer: multinomial logistic regression under the cross-entropy loss."""

    def __init__(self, inputs: int = 784, classes: int = 10) -> None:
        super().__init__()
        check_sizes("Logistic", inputs=inputs, classes=classes)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[N, classes]` of samples `[N, …]` with `inputs` numbers each."""
        return self.head(x.flatten(1))


class MLP(nn.Module):
    """Linear layers with ReLU between them; `hidden` is one width or several.

    >>> MLP(inputs=64, hidden=(32, 16), classes=10).layers
    Sequential(
      (0): Linear(in_features=64, out_features=32, bias=True)
      (1): ReLU()
      (2): Linear(in_features=32, out_features=16, bias=True)
      (3): ReLU()
      (4): Linear(in_features=16, out_features=10, bias=True)
    )
    """

    def __init__(self, inputs: int = 784, hidden: int | Sequence[int] = 64, classes: int = 10) -> None:
        super().__init__()
        widths = list(hidden) if isinstance(hidden, Sequence) and not isinstance(hidden, str) else [hidden]
        check_sizes("MLP", inputs=inputs, classes=classes)
        for width in widths:
            check_sizes("MLP", hidden=width)
        layers: list[nn.Module] = []
        for before, after in zip([inputs, *widths], widths, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear([inputs, *widths][-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[N, classes]` of samples `[N, …]` with `inputs` numbers each."""
        return self.layers(x.flatten(1))
