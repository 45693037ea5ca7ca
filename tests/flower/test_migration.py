"""The migration guide of the page on Flower: the same method with the same weighting gives the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlalr as fl

pytest.importorskip("flwr")

PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names after running the example of the page."""
    (example,) = (
        code for code in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.S | re.M) if "NumPyClient" in code
    )
    names: dict[str, Any] = {"__name__": "page", "torch": torch, "fl": fl}
    exec(compile(example, "flower.md", "exec", dont_inherit=True), names)
    return names


def farthest(names: dict[str, Any], model: torch.nn.Module) -> float:
    arrays = [torch.tensor(array) for array in names["arrays"]]
    return max(float((a - b).abs().max()) for a, b in zip(model.state_dict().values(), arrays, strict=True))


def test_a_numpy_client_and_fedavg_weighted_by_samples_give_the_same_weights(names: dict[str, Any]) -> None:
    assert farthest(names, names["same"].model) < 1e-6


def test_replies_are_weighted_equally_by_default(names: dict[str, Any]) -> None:
    options = {"rounds": 4, "local": fl.Steps(3), "batch_size": None}
    result = fl.run(names["start"], names["owned"], fl.FedAvg(lr=0.1), **options)
    assert farthest(names, result.model) > 1e-3


def test_the_weights_convert_back_to_flowers_records(names: dict[str, Any]) -> None:
    from flwr.app import ArrayRecord

    record = ArrayRecord(names["weights"])
    again = torch.nn.Linear(4, 2)
    again.load_state_dict(record.to_torch_state_dict())
    assert torch.equal(again.weight, names["same"].model.weight)
