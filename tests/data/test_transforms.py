"""Transforms: against a sample-by-sample construction, and as pure functions of their integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor

from fedlalr.data.transforms import STATISTICS, FlipCrop, Normalize

CIFAR10 = STATISTICS["cifar10"]


def images(n: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)


def integers(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**63 - 1, (n, 1), generator=torch.Generator().manual_seed(seed))


def one_by_one(batch: Tensor, random: Tensor, transform: FlipCrop) -> Tensor:
    """Normalise, mirror, pad with zeros, cut out: one image at a time, with torch's own padding."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
    pad, (height, width) = transform.pad, batch.shape[2:]
    results = []
    for image, number in zip(batch, random[:, 0].tolist(), strict=True):
        normal = (image.float() / 255 - mean) / std
        rest, mirror = divmod(number, 2)
        rest, top = divmod(rest, 2 * pad + 1)
        left = rest % (2 * pad + 1)
        padded = torch.nn.functional.pad(normal.flip(2) if mirror else normal, (pad, pad, pad, pad))
        results.append(padded[:, top : top + height, left : left + width])
    return torch.stack(results)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 9), st.sampled_from((1, 3)), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5), st.integers()
)
def test_flip_crop_equals_the_construction_image_by_image(n, channels, height, width, pad, seed):
    transform = FlipCrop(CIFAR10[0][:channels], CIFAR10[1][:channels], pad=pad)
    batch, random = images(n, channels, height, width), integers(n, seed % 2**32)
    torch.testing.assert_close(transform.train(batch, random), one_by_one(batch, random, transform))


def test_every_flip_and_shift_is_equally_likely():
    transform = FlipCrop((0.0,), (1.0,), pad=1)
    batch = torch.zeros(18_000, 1, 3, 3)
    batch[:, 0, 1, 1], batch[:, 0, 1, 2] = 0.5, 1.0
    outcomes, counts = transform.train(batch, integers(18_000)).flatten(1).unique(dim=0, return_counts=True)
    assert len(outcomes) == 18
    # A thousand each, with a standard deviation of 31.
    assert counts.min() > 870
    assert counts.max() < 1130


def test_the_border_is_zero_and_not_black():
    transform = FlipCrop((0.5,), (0.25,), pad=4)
    black = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    assert set(transform.train(black, integers(64)).unique().tolist()) == {-2.0, 0.0}


def test_augmentation_of_a_sample_depends_on_its_own_integers_only():
    transform, batch, random = FlipCrop(*CIFAR10), images(10), integers(10)
    whole = transform.train(batch, random)
    order = torch.tensor([7, 2, 9])
    assert torch.equal(transform.train(batch[order], random[order]), whole[order])
    assert torch.equal(transform.train(batch, random), whole)


def test_bytes_become_float32_and_floats_keep_their_type():
    transform, batch, random = FlipCrop(*CIFAR10), images(4), integers(4)
    assert transform.train(batch, random).dtype == transform.test(batch).dtype == torch.float32
    double = transform.train(batch.double() / 255, random)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), transform.train(batch, random))


def test_both_transforms_evaluate_alike_and_normalize_never_augments():
    batch, mean = images(4), torch.tensor(CIFAR10[0]).view(-1, 1, 1)
    plain = Normalize(*CIFAR10)
    expected = (batch.float() / 255 - mean) / torch.tensor(CIFAR10[1]).view(-1, 1, 1)
    torch.testing.assert_close(plain.test(batch), expected)
    assert torch.equal(plain.train(batch, torch.empty(4, 0, dtype=torch.int64)), plain.test(batch))
    assert torch.equal(FlipCrop(*CIFAR10).test(batch), plain.test(batch))
    assert (plain.draws, FlipCrop(*CIFAR10).draws) == (0, 1)


def test_raw_images_are_left_as_they_were():
    batch = images(4)
    before = batch.clone()
    FlipCrop(*CIFAR10).train(batch, integers(4))
    assert torch.equal(batch, before)


def test_an_empty_batch_stays_empty():
    assert FlipCrop(*CIFAR10).train(images(0), integers(0)).shape == (0, 3, 32, 32)


def test_constants_made_in_inference_mode_serve_training():
    transform = Normalize((0.123,), (0.456,))
    with torch.inference_mode():
        transform.test(torch.rand(1, 1, 2, 2))
    image = torch.rand(1, 1, 2, 2, requires_grad=True)
    transform.test(image).sum().backward()
    torch.testing.assert_close(image.grad, torch.full((1, 1, 2, 2), 1 / 0.456))


def test_the_statistics_of_the_digits_are_those_of_the_data():
    pixels = load_digits().images / 16
    mean, std = STATISTICS["digits"]
    assert (pixels.mean(), pixels.std()) == (pytest.approx(mean[0], abs=1e-4), pytest.approx(std[0], abs=1e-4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalize((0.5,), (0.5, 0.5)), "one number per channel"),
        (lambda: Normalize((), ()), "one number per channel"),
        (lambda: Normalize((0.5,), (0.0,)), "std must be finite numbers above 0"),
        (lambda: Normalize((float("nan"),), (1.0,)), "mean must be finite"),
        (lambda: FlipCrop((0.5,), (0.5,), pad=-1), "pad must be"),
        (lambda: Normalize(*CIFAR10).test(images(2, channels=1)), r"images must be \[N, 3, height, width\]"),
        (lambda: Normalize(*CIFAR10).test(images(2).long()), "must be bytes"),
    ],
)
def test_wrong_input_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_augmentation_never_waits_and_equals_the_cpu():
    transform, batch, random = FlipCrop(*CIFAR10), images(64), integers(64)
    resident, drawn = batch.cuda(), random.cuda()
    transform.train(resident, drawn)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = transform.train(resident, drawn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(result.cpu(), transform.train(batch, random))
