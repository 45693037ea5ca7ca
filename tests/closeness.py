"""How far two results of the same arithmetic may be apart, on whatever processor."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOLERANCE = 1e-12
"""In float64: some 4,500 roundings. Another order of sums, or another exp and tanh, costs a few in each local step;
dividing by a rate or a small √v̂ multiplies them by at most a few hundred in the problems of these tests."""


def difference(given: Tensor | NDArray[np.float64], wanted: Tensor | NDArray[np.float64]) -> float:
    """The largest deviation, measured in the largest entry: larger numbers have cancelled in a small one."""
    given, wanted = torch.as_tensor(given), torch.as_tensor(wanted)
    assert given.shape == wanted.shape
    assert given.dtype == wanted.dtype
    given, wanted = given.detach().double(), wanted.detach().double()
    return float((given - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)


def assert_close(
    given: Tensor | NDArray[np.float64], wanted: Tensor | NDArray[np.float64], tolerance: float = TOLERANCE
) -> None:
    assert difference(given, wanted) <= tolerance
