"""How good a model is: the numbers of `evaluate`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlalr.federation.evaluation import _at_once, evaluate
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


@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_a_batch_that_is_too_large_for_the_memory_is_parted(error: BaseException) -> None:
    sizes = []

    class Large(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            sizes.append(len(inputs))
            if len(inputs) > 3:
                raise error
            return super().forward(inputs)

    torch.manual_seed(0)
    module, test = Large(4, 3), (torch.randn(11, 4), torch.randint(3, (11,)))
    mine = evaluate(module, test, F.cross_entropy)
    assert sizes == [11, 6, 3, 3, 5, 3, 2]
    outputs = F.linear(test[0], module.weight, module.bias)
    assert mine.loss == pytest.approx(float(F.cross_entropy(outputs, test[1]).detach()), rel=1e-6)
    assert mine.accuracy == pytest.approx(float((outputs.argmax(1) == test[1]).float().mean()))


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (nn.CrossEntropyLoss(ignore_index=255), 255),
        (partial(F.cross_entropy, ignore_index=7), 7),
        (F.nll_loss, -100),
        (nn.NLLLoss(ignore_index=9), 9),
    ],
)
@pytest.mark.parametrize("places", [(), (5,)])
def test_labels_that_the_loss_passes_over_do_not_count(loss, ignored: int, places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Conv1d(4, 3, 1) if places else nn.Linear(4, 3)
    inputs, targets = torch.randn(12, 4, *places), torch.randint(3, (12, *places))
    targets[:5] = ignored  # the whole of the first batch and a part of the second
    mine = evaluate(module, (inputs, targets), loss, batch_size=4)
    with torch.no_grad():
        outputs = module(inputs)
    assert mine.loss == pytest.approx(float(loss(outputs, targets)), rel=1e-6)
    kept = targets != ignored
    assert mine.accuracy == pytest.approx(float((outputs.argmax(1) == targets)[kept].float().mean()))
    nothing = evaluate(module, (inputs, torch.full_like(targets, ignored)), loss)
    assert math.isnan(nothing.loss)
    assert nothing.accuracy is None


def test_an_error_of_the_model_is_not_taken_for_a_lack_of_memory() -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        evaluate(Broken(4, 3), (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)), F.cross_entropy)


@pytest.mark.parametrize(("numbers", "cuda"), [(80, 8192), (3 * 32 * 32, 5461), (3 * 224 * 224, 111), (1 << 30, 1)])
def test_batches_on_a_gpu_are_as_large_as_samples_are_small(numbers: int, cuda: int) -> None:
    assert _at_once(numbers, torch.device("cuda")) == cuda
    assert _at_once(numbers, torch.device("cpu")) == 100


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


WEIGHTS = torch.tensor([1.0, 0.0, 15.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(weight=WEIGHTS + 0.5, ignore_index=0, label_smoothing=0.1),
        partial(F.cross_entropy, weight=WEIGHTS),
        nn.NLLLoss(weight=WEIGHTS),
    ],
)
@pytest.mark.parametrize("places", [(), (5,)])
def test_weights_of_classes_weigh_the_samples_of_all_batches_alike(loss, places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Conv1d(4, 3, 1) if places else nn.Linear(4, 3)
    inputs, targets = torch.randn(12, 4, *places), torch.randint(3, (12, *places)).sort(0).values
    targets[:4] = 1  # a batch of little weight, or none
    mine = evaluate(module, (inputs, targets), loss, batch_size=4)
    with torch.no_grad():
        assert mine.loss == pytest.approx(float(loss(module(inputs), targets)), rel=1e-5)
