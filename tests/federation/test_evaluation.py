"""How good a model is: the numbers of `evaluate`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlalr.federation.evaluation import evaluate
from fedlalr.models import ConvMixer


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_evaluation_in_batches_is_the_modules_own_over_all_samples(compute: torch.dtype | None) -> None:
    torch.manual_seed(0)
    module = ConvMixer(dim=4, depth=1, kernel=3)
    images, targets = torch.randn(11, 3, 8, 8), torch.randint(10, (11,))
    module(images)  # running statistics of its own
    mine = evaluate(module, (images, targets), F.cross_entropy, batch_size=4, compute=compute)
    assert all(layer.training for layer in module.modules())
    with torch.no_grad(), torch.autocast("cpu", compute, enabled=compute is not None):
        outputs = module.eval()(images)
    assert mine.loss == pytest.approx(
        float(F.cross_entropy(outputs.float(), targets)), rel=1e-5 if compute is None else 1e-2
    )
    assert mine.accuracy == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))


def test_there_is_no_accuracy_without_classes() -> None:
    module = nn.Linear(3, 1)
    test = torch.randn(5, 3), torch.randn(5, 1)
    assert evaluate(module, test, F.mse_loss).accuracy is None


def test_outputs_that_are_not_finite_are_never_right() -> None:
    module = nn.Linear(3, 2)
    images = torch.randn(4, 3)
    images[:2] = torch.nan
    with torch.no_grad():
        targets = module(images).argmax(1)
    assert targets[0] == 0  # the argmax of NaN
    assert evaluate(module, (images, targets), F.cross_entropy).accuracy == 0.5


def test_a_class_that_is_ruled_out_by_minus_infinity_does_not_make_an_answer_wrong() -> None:
    class Masked(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            outputs[:, 2] = -torch.inf
            return outputs

    module, images = Masked(3, 3), torch.randn(4, 3)
    with torch.no_grad():
        targets = module(images).argmax(1)
    assert evaluate(module, (images, targets), F.cross_entropy).accuracy == 1


def test_whole_numbers_are_no_classes_for_a_single_output() -> None:
    def squared(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs[:, 0], wanted.float())

    test = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)
    assert evaluate(nn.Linear(3, 1), test, squared).accuracy is None
