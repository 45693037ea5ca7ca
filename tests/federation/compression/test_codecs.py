"""Codecs: sizes, error bounds that follow from their arithmetic, and what they must never turn into a number."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import fedlalr as fl
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.codecs import Codec, _long, _short, pack, unpack
from fedlalr.federation.compression.compression import Compression

BFloat16, Int, Log = fl.codecs.BFloat16, fl.codecs.Int, fl.codecs.Log
DTYPES = (torch.float32, torch.float64)
BLOCK = 8

every_codec = pytest.mark.parametrize(
    "codec",
    [BFloat16(), Int(8, BLOCK), Int(4, BLOCK), Int(8, BLOCK, "nearest"), Log(8, BLOCK), Log(4, BLOCK)],
    ids=str,
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)

sizes = st.integers(1, 3 * BLOCK + 1)
wide = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
above_zero = st.floats(2.0**-100, 2.0**100, width=32) | st.floats(1.0, 2.0, width=32)


def numbers(elements: st.SearchStrategy[float], rows: int = 2) -> st.SearchStrategy[Tensor]:
    arrays = sizes.flatmap(lambda size: hnp.arrays("f4", (rows, size), elements=elements))
    return arrays.map(torch.from_numpy)


def drawn(values: Tensor, seed: int = 0, clients: range | None = None) -> partial[Tensor]:
    channel = Channel(Compression(), fl.FedAvg().slots, values.shape[1], values.dtype, seed, 1)
    return partial(channel._draw("x", clients or range(len(values)), values))


def sent(codec: Codec, values: Tensor, reference: Tensor | None = None) -> Tensor:
    """What arrives, after checking that as many bytes travelled as the codec says."""
    content = codec.encode(values, reference, drawn(values))
    assert content.dtype == torch.uint8
    assert content.shape == (len(values), codec.size(values.shape[1], values.dtype, reference is not None))
    found = codec.decode(content, reference, values.shape[1], values.dtype)
    assert found.shape == values.shape
    assert found.dtype == values.dtype
    return found


def largest_in_block(values: Tensor, block: int = BLOCK) -> Tensor:
    """The largest magnitude in each number's block."""
    blocks = [part.abs().amax(1, keepdim=True).expand_as(part) for part in values.split(block, 1)]
    return torch.cat(blocks, 1)


@every_dtype
@given(values=numbers(wide))
@quick
def test_bfloat16_keeps_eight_binary_digits(dtype, values):
    values = values.to(dtype)
    found = sent(BFloat16(), values)
    assert ((found - values).double().abs() <= values.double().abs() * 2.0**-8 + 2.0**-134).all()


@every_dtype
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@given(values=numbers(wide))
@quick
def test_an_integer_is_off_by_at_most_a_step(dtype, bits, rounding, values):
    values = values.to(dtype)
    most, unit = 2 ** (bits - 1) - 1, torch.finfo(dtype).eps / 2
    scale = largest_in_block(values).double() * (1 + 2.0**-8) + 2.0**-134  # rounded up; the last digit if subnormal
    steps = 0.5 if rounding == "nearest" else 1.0
    bound = scale / most * (steps + 2 * most * unit) + scale * unit  # quotient and product are rounded, then the result
    found = sent(Int(bits, BLOCK, rounding), values)
    assert ((found - values).double().abs() <= bound).all()
    assert (found[values == 0] == 0).all()
    if rounding == "nearest":  # so that momentum divided by √v̂ is at most twice as long
        assert (found.abs().double() <= values.abs().double() * 2 * (1 + 4 * most * unit)).all()


@every_dtype
@pytest.mark.parametrize("bits", [8, 4])
@given(values=numbers(above_zero), growth=st.floats(0, 40))
@example(values=torch.tensor([[0.25], [1.0]]), growth=2.0**-52)
@quick
def test_a_logarithm_is_off_by_half_a_step_and_never_below_its_reference(dtype, bits, values, growth):
    values = values.to(dtype)
    reference = values[0] * 2.0**-growth
    values = torch.maximum(values, reference)
    found = sent(Log(bits, BLOCK), values, reference)
    assert (found >= reference).all()
    assert (found[values == reference] == reference.expand_as(values)[values == reference]).all()
    _assert_half_a_step(found, values, reference.expand_as(values), bits)


@every_dtype
@pytest.mark.parametrize("bits", [8, 4])
@given(values=numbers(above_zero))
@quick
def test_a_logarithm_without_reference_is_never_below_the_smallest_of_its_block(dtype, bits, values):
    values = values.to(dtype)
    found = sent(Log(bits, BLOCK), values)
    smallest = torch.cat([part.amin(1, keepdim=True).expand_as(part) for part in values.split(BLOCK, 1)], 1)
    assert (found >= smallest).all()
    assert (found[values == smallest] == values[values == smallest]).all()
    _assert_half_a_step(found, values, smallest, bits)


def _assert_half_a_step(found: Tensor, values: Tensor, base: Tensor, bits: int) -> None:
    """In bit patterns, which are the logarithms that are quantised."""
    kind, fraction = (torch.int32, 23) if values.dtype == torch.float32 else (torch.int64, 52)
    exact = (values.view(kind) - base.contiguous().view(kind)).double()
    width = largest_in_block(exact) * (1 + 2.0**-10) + 2.0 ** (fraction - 24)  # float16, rounded up
    bound = width / (2 * (2**bits - 1)) + 0.5 + width * 2.0**-22
    off = (found.view(kind) - values.view(kind)).double()
    assert (off.abs() <= bound).all()
    largest = (exact == largest_in_block(exact)) & (exact >= 2.0 ** (fraction - 14))  # where float16 has all its digits
    rounded = exact * 2.0**-fraction  # beyond 2^24 or 2^53 a difference of bit patterns is itself rounded
    assert (off[largest] >= -rounded[largest]).all()  # otherwise the width is rounded up


@every_dtype
@pytest.mark.parametrize("codec", [BFloat16(), Int(8, BLOCK, "nearest"), Int(4, BLOCK, "nearest")], ids=str)
@given(values=numbers(wide))
@quick
def test_what_arrived_is_sent_without_another_error(dtype, codec, values):
    once = sent(codec, values.to(dtype))
    assert torch.equal(sent(codec, once), once)


@every_dtype
@pytest.mark.parametrize("bits", [8, 4])
@given(values=numbers(above_zero))
@quick
def test_a_logarithm_that_arrived_is_sent_without_another_error(dtype, bits, values):
    once = sent(Log(bits, BLOCK), values.to(dtype))
    assert torch.equal(sent(Log(bits, BLOCK), once), once)


@given(codes=hnp.arrays("u1", st.tuples(st.integers(0, 3), st.integers(0, 9)), elements=st.integers(0, 15)))
@quick
def test_codes_of_four_bits_take_half_a_byte(codes):
    codes = torch.from_numpy(codes)
    packed = pack(codes, 4)
    assert packed.shape == (len(codes), math.ceil(codes.shape[1] / 2))
    assert torch.equal(unpack(packed, 4, codes.shape[1]), codes)


@every_codec
@every_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_a_number_that_is_not_finite_stays_so(codec, dtype, poison):
    values = torch.linspace(1, 2, 20, dtype=dtype).repeat(3, 1)
    values[1, 9] = poison
    for reference in (None, torch.full_like(values[0], 0.5)):
        finite = sent(codec, values, reference).isfinite().all(1)
        assert finite.tolist() == [True, False, True]


@every_dtype
@pytest.mark.parametrize("low", [0.4999, 0.0, -0.0, -1.0])
def test_a_fall_is_not_sent_as_no_growth(dtype, low):
    values = torch.linspace(1, 2, 20, dtype=dtype).repeat(2, 1)
    values[1, 9] = low
    finite = sent(Log(4, BLOCK), values, torch.full_like(values[0], 0.5)).isfinite().all(1)
    assert finite.tolist() == [True, False]


def test_a_huge_growth_does_not_hide_an_infinite_one():
    """The nearest step of the infinite growth is finite: 154 powers of two are the largest, so a step has ten."""
    reference = torch.tensor([1e-16, 1.0])
    assert not sent(Log(4), torch.tensor([[3e30, math.inf]]), reference).isfinite().all()


def test_the_nan_of_a_gpu_is_no_scale():
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert not _long(_short(nan), torch.float32).isfinite()


@pytest.mark.gpu
@every_codec
@every_dtype
def test_a_gpu_writes_and_reads_the_same_bits_without_waiting(codec, dtype):
    values = torch.rand(4, 1000, dtype=dtype) * torch.logspace(-30, 3, 1000, dtype=dtype)
    for reference in (None, values.amin(0)):
        near = codec.encode(values, reference, drawn(values))
        there = values.cuda()
        known = None if reference is None else reference.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            far = codec.encode(there, known, drawn(there))
            found = codec.decode(far, known, 1000, dtype)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(far.cpu(), near)
        assert torch.equal(found.cpu(), codec.decode(near, reference, 1000, dtype))
        there[1, 9] = torch.nan
        assert not codec.decode(codec.encode(there, known, drawn(there)), known, 1000, dtype)[1].isfinite().all()


@every_codec
@every_dtype
def test_blocks_of_zeros_and_of_the_smallest_numbers(codec, dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = torch.cat([torch.zeros(2, BLOCK), torch.full((2, BLOCK + 1), smallest, dtype=dtype)], 1).to(dtype)
    found = sent(codec, values)
    assert (found[:, :BLOCK] == 0).all()
    assert (found.abs() < 1e-38).all()


@every_codec
@every_dtype
@given(data=st.data())
@quick
def test_any_bytes_are_decoded_or_not_finite(codec, dtype, data):
    count = data.draw(sizes)
    for reference in (None, torch.linspace(1e-16, 2, count, dtype=dtype)):
        size = codec.size(count, dtype, reference is not None)
        content = torch.tensor([list(data.draw(st.binary(min_size=size, max_size=size)))], dtype=torch.uint8)
        found = codec.decode(content, reference, count, dtype)
        assert found.shape == (1, count)
        if isinstance(codec, Log) and reference is not None:
            assert ((found >= reference) | ~found.isfinite()).all()


def test_stochastic_rounding_is_right_on_average_and_nearest_is_not():
    clients = 4000
    values = torch.linspace(-1, 1, 65)[None].repeat(clients, 1)
    step = (1 + 2.0**-8) / 7
    bound = 5 * step / 2 / math.sqrt(clients)  # five standard errors: a draw's deviation is at most half a step
    for rounding, unbiased in (("stochastic", True), ("nearest", False)):
        error = (sent(Int(4, 65, rounding), values) - values).double().mean(0).abs()
        assert bool((error <= bound).all()) is unbiased
    errors = (sent(Int(4, 65), values) - values).double()
    inner = errors[:, 1:-1].std(0)
    assert inner.mean() > 0.3 * step  # the mean over a step of √(p (1 − p)) is π/8
    correlation = torch.corrcoef(errors[:, [20, 21]].t())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(clients)


def test_random_numbers_depend_on_seed_round_slot_and_client_alone():
    table, values = fl.FedAvg().slots, torch.zeros(3, 50)

    def draw(seed=0, round=1, slot="x", clients=(4, 5, 6)):
        return Channel(Compression(), table, 50, torch.float32, seed, round)._draw(slot, clients, values)()

    first = draw()
    assert torch.equal(first[1:2], draw(clients=(5,)))
    assert first.min() >= 0
    assert first.max() < 1
    others = [draw(seed=1), draw(round=2), draw(slot="m"), draw(clients=(1, 2, 3))]
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int(5), "bits must be one of 8, 4, not 5"),
        (lambda: Log(True), "bits must be one of 8, 4"),
        (lambda: Int(8, 0), "block must be a whole number of at least 1"),
        (lambda: Log(4, 1 << 21), "block must be at most"),
        (lambda: Int(rounding="up"), "rounding must be one of"),
        (lambda: Int(feedback=1), "feedback must be True or False"),
    ],
)
def test_invalid_options_are_rejected(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
