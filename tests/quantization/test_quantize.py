"""Float weights to integers: the plain rule, the clip search, and error compensation from statistics of inputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpumoe import QuantizedLinear, Scheme, UnsupportedScheme
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import dequantize
from cpumoe.layers.rounding import plain_scales, quantize_weight, search_scales
from cpumoe.quantization import gptq
from cpumoe.quantization.gptq import MIN_TOKENS, InputStatistics, quantize_with_statistics

SCHEMES = ["w4a8", "w4a8-g32", "w4a8-g128", "w8a8", "w4a16-g32", "w8a16-g128"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are small: threads would spend their time waiting for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Student's t with 3 degrees of freedom: a Gaussian over the root of a mean of 3 squares."""
    return gaussian(*shape, seed=seed) / gaussian(3, *shape, seed=seed + 1).square().mean(0).sqrt()


@functools.cache
def orthogonal(size: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(gaussian(size, size, seed=100))[0]
    return basis


def correlated(tokens: int, inputs: int, seed: int) -> Tensor:
    """Inputs of one distribution whatever the seed: spectrum 1/i in a random basis, channels of different size."""
    basis = orthogonal(inputs)
    spectrum = torch.arange(1, inputs + 1).rsqrt()
    return (gaussian(tokens, inputs, seed=seed) * spectrum) @ basis.T * gaussian(inputs, seed=101).mul(0.5).exp()


def statistics_of(x: Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1])
    statistics.add(x)
    return statistics


def group_errors(weight: Tensor, quantised: QuantizedWeight) -> Tensor:
    """Squared errors [..., out, groups] in fp64."""
    squares = (dequantize(quantised).double() - weight.double()).square()
    grouped: Tensor = squares.unflatten(-1, (quantised.scales.shape[-1], -1))
    return grouped.sum(-1)


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    return torch.equal(one.values, other.values) and torch.equal(one.scales, other.scales)


def output_error(weight: Tensor, quantised: QuantizedWeight, x: Tensor) -> float:
    return float((x @ (dequantize(quantised) - weight.float()).T).norm() / (x @ weight.float().T).norm())


def assert_sound(weight: Tensor, quantised: QuantizedWeight, scheme: Scheme) -> None:
    values, scales = quantised.values, quantised.scales
    assert quantised.element == scheme.weights.element
    assert quantised.zero_points is None and quantised.factors is None and quantised.bias is None
    largest = scheme.weights.largest
    assert values.dtype == torch.int8 and values.shape == weight.shape
    assert values.min() >= -largest - 1 and values.max() <= largest
    assert scales.dtype == (torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32)
    assert scales.shape == (*weight.shape[:-1], weight.shape[-1] // (scheme.group_size or weight.shape[-1]))
    assert bool((torch.isfinite(scales) & (scales > 0)).all())


# The plain rule


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_plain_rule_is_that_of_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    weight = heavy_tailed(2, 3, 256).to(dtype)
    weight[1, 2, :128] = 0
    quantised = quantize_weight(weight, scheme)
    values, scales = quantised.values, quantised.scales
    assert_sound(weight, quantised, scheme)
    bits, size = scheme.weights.bits, scheme.group_size or 256
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(256 // size)).tolist():
        row, columns = tuple(index[:2]), slice(index[2] * size, (index[2] + 1) * size)
        group = weight[row][columns].float()
        scale = (group.abs().max() / ((2**bits - 1) / 2)).to(scales.dtype)
        if scale == 0:
            scale = torch.tensor(torch.finfo(scales.dtype).eps, dtype=scales.dtype)
        assert scales[tuple(index)] == scale
        expected = torch.clamp(torch.round(group / scale.float()), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert torch.equal(values[row][columns].float(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["w4a16-asym", "w4a16-g32-asym", "w4a16-g128-asym"])
def test_zero_points_are_those_of_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = Scheme.parse(name)
    weight = (heavy_tailed(6, 256) + 0.5 * gaussian(6, 1)).to(dtype)
    weight[1], weight[2, :128], weight[3], weight[4] = weight[1].abs() + 1, 0, -weight[3].abs() - 1, 0
    quantised = quantize_weight(weight, scheme)
    groups = weight.float().unflatten(-1, (-1, scheme.group_size or 256))
    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="channel")
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    found = groups.abs().amax(-1) > 0  # of zeros alone it makes other scales, which mean the same
    expected = scales.to(quantised.scales.dtype)
    assert torch.equal(quantised.scales[found], expected[found])
    if dtype != torch.bfloat16:  # where the rounded scale decides, with us
        assert torch.equal(quantised.zero_points[found], zeros.to(torch.int8)[found])
    assert quantised.values.dtype == quantised.zero_points.dtype == torch.int8
    for integers in (quantised.values, quantised.zero_points):
        assert integers.min() >= -8 and integers.max() <= 7
    steps = quantised.scales.float().repeat_interleave(256 // quantised.scales.shape[1], 1)
    # Half a step of the value and half of the zero point; a scale in bf16 may be a little too small for the range.
    slack = 15 * 2.0**-8 if dtype == torch.bfloat16 else 1e-4
    assert bool(((dequantize(quantised) - weight.float()).abs() <= (1 + slack) * steps).all())
    assert bool((dequantize(quantised)[weight == 0] == 0).all())


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["w4a16-asym", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    exponent=st.integers(-46, 37),
    seed=st.integers(0, 1000),
)
def test_any_size_of_weight_is_quantised_to_the_other_schemes(
    name: str, dtype: torch.dtype, rows: int, groups: int, exponent: int, seed: int
) -> None:
    """Finite numbers of the size of the weights: packing accepts them, and no group is off by more than its size."""
    scheme = Scheme.parse(name)
    weight = (gaussian(rows, groups * 32, seed=seed).double() * 10.0**exponent).to(dtype)
    quantised = quantize_weight(weight, scheme)
    QuantizedLinear.from_weight(quantised, scheme)
    held = dequantize(quantised).double()
    assert bool(held.isfinite().all())
    # Of the smallest weights the scale is the smallest that there is; what it cannot count becomes zero.
    assert float((held - weight.double()).abs().max()) <= max(0.34 * float(weight.double().abs().max()), 1e-35)


# The clip search


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_clip_search_is_never_worse_in_a_group_and_better_in_sum(name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    weight = heavy_tailed(3, 40, 512).to(dtype)
    plain, searched = quantize_weight(weight, scheme), quantize_weight(weight, scheme, clip_search=True)
    assert_sound(weight, searched, scheme)
    before, after = group_errors(weight.float(), plain), group_errors(weight.float(), searched)
    assert bool((after <= before).all())
    # Less squared error in all by at least this share; the last is what int8 can gain, which loses little to clipping.
    gain = {"w4a8": 0.25, "w4a8-g32": 0.1, "w4a8-g128": 0.1, "w8a8": 0.001, "w4a16-g32": 0.1, "w8a16-g128": 0.0}[name]
    assert after.sum() < (1 - gain) * before.sum()


def test_clip_search_finds_the_scale_that_clips_nothing() -> None:
    weight = torch.arange(-7, 8).float().repeat(3)[:32].unsqueeze(0)  # exact with a scale of 1, not with 7 / 7.5
    assert torch.equal(dequantize(quantize_weight(weight, Scheme.parse("w4a8-g32"), clip_search=True)), weight)


def test_clip_search_does_not_depend_on_chunks_or_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = heavy_tailed(2, 96, 64)
    scheme = Scheme.parse("w4a8-g32")
    whole = quantize_weight(weight, scheme, clip_search=True)
    strided = quantize_weight(weight.transpose(1, 2).contiguous().transpose(1, 2), scheme, clip_search=True)
    assert same(strided, whole)
    for chunk in (1, 1000):
        monkeypatch.setattr("cpumoe.layers.rounding._CHUNK", chunk)
        assert same(quantize_weight(weight, scheme, clip_search=True), whole)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(0, 5),
    groups=st.integers(1, 3),
    exponent=st.integers(-46, 37),
    seed=st.integers(0, 1000),
)
def test_any_size_of_weight_is_quantised(
    name: str, dtype: torch.dtype, rows: int, groups: int, exponent: int, seed: int
) -> None:
    scheme = Scheme.parse(name)
    weight = (gaussian(rows, groups * (scheme.group_size or 5), seed=seed).double() * 10.0**exponent).to(dtype)
    plain, searched = quantize_weight(weight, scheme), quantize_weight(weight, scheme, clip_search=True)
    if rows > 0:
        assert_sound(weight, searched, scheme)
    assert bool((group_errors(weight, searched) <= group_errors(weight, plain)).all())


def test_weights_that_need_gradients() -> None:
    weight = torch.nn.Parameter(gaussian(8, 64))
    scheme = Scheme.parse("w4a8-g32")
    expected = quantize_weight(weight.detach(), scheme, clip_search=True)
    assert same(quantize_weight(weight, scheme, clip_search=True), expected)
    assert not quantize_with_statistics(weight, statistics_of(gaussian(64, 64)), scheme).scales.requires_grad


def test_bad_weights_are_refused() -> None:
    scheme = Scheme.parse("w4a8-g32")
    for search in (False, True):
        with pytest.raises(ValueError, match=r"down is torch.int8; a floating point dtype is accepted"):
            quantize_weight(torch.zeros(2, 32, dtype=torch.int8), scheme, "down", clip_search=search)
        with pytest.raises(ValueError, match=r"down holds NaN or infinity; only finite"):
            quantize_weight(torch.full((2, 32), torch.inf), scheme, "down", clip_search=search)
        with pytest.raises(UnsupportedScheme, match=r"down: group_size=32 does not divide in_features=48"):
            quantize_weight(torch.zeros(2, 48), scheme, "down", clip_search=search)
        with pytest.raises(ValueError, match=r"down is \[2, 0\]; .* at least one input is accepted"):
            quantize_weight(torch.zeros(2, 0), scheme, "down", clip_search=search)


# Statistics of inputs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_statistics_are_the_mean_of_outer_products(dtype: torch.dtype) -> None:
    x = gaussian(100, 24).to(dtype)
    statistics = InputStatistics(24)
    assert statistics.tokens == 0 and not statistics.hessian.any()
    for part in x.split([1, 0, 60, 39]):
        statistics.add(part)
    assert statistics.tokens == 100 and statistics.hessian.dtype == torch.float32
    torch.testing.assert_close(statistics.hessian.double(), x.double().T @ x.double() / 100, rtol=1e-5, atol=1e-6)


def test_late_tokens_count_as_much_as_early_ones() -> None:
    statistics = InputStatistics(1)
    statistics.add(torch.zeros(1, 1))
    statistics.tokens = 2**24  # as after that many tokens of zero: a sum in fp32 would no longer take up single ones
    for _ in range(100):
        statistics.add(torch.ones(1, 1))
    assert float(statistics.hessian) == pytest.approx(100 / (2**24 + 100), rel=1e-4)


def test_enough_tokens() -> None:
    statistics = InputStatistics(2)
    assert not statistics.sufficient
    statistics.add(torch.ones(MIN_TOKENS - 1, 2))
    assert not statistics.sufficient
    statistics.add(torch.ones(1, 2))
    assert statistics.sufficient


def test_bad_inputs_are_refused_and_leave_the_statistics_alone() -> None:
    statistics = statistics_of(gaussian(10, 4))
    before = statistics.hessian.clone()
    for bad in (torch.nan, torch.inf):
        x = gaussian(3, 4)
        x[1, 2] = bad
        with pytest.raises(ValueError, match=r"x holds NaN or infinity \(first in row 1\); finite"):
            statistics.add(x)
    with pytest.raises(ValueError, match=r"first in row 0"):
        statistics.add(torch.full((1, 4), 1e300, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x is \[3, 5\]; \[tokens, 4\] is accepted"):
        statistics.add(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"x is \[1, 3, 4\]; \[tokens, 4\] is accepted"):
        statistics.add(torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match=r"x is torch.int64; a floating point dtype is accepted"):
        statistics.add(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"in_features=0; a positive number is accepted"):
        InputStatistics(0)
    assert statistics.tokens == 10 and torch.equal(statistics.hessian, before)


# Error compensation


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 2048])
@pytest.mark.parametrize("name", SCHEMES)
def test_compensation_beats_rounding_on_inputs_not_seen(name: str, tokens: int) -> None:
    scheme = Scheme.parse(name)
    weight, held_out = gaussian(64, 256, seed=3), correlated(512, 256, seed=1)
    compensated = quantize_with_statistics(weight, statistics_of(correlated(tokens, 256, seed=2)), scheme)
    assert_sound(weight, compensated, scheme)
    error = output_error(weight, compensated, held_out)
    assert error < 0.85 * output_error(weight, quantize_weight(weight, scheme), held_out)
    assert error < 0.85 * output_error(weight, quantize_weight(weight, scheme, clip_search=True), held_out)


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 2048])
@pytest.mark.parametrize("name", SCHEMES)
def test_compensation_is_not_misled_by_chance(name: str, tokens: int) -> None:
    scheme = Scheme.parse(name)
    weight, held_out = gaussian(64, 256, seed=3), gaussian(512, 256, seed=1)
    compensated = quantize_with_statistics(weight, statistics_of(gaussian(tokens, 256, seed=2)), scheme)
    rounded = quantize_weight(weight, scheme, clip_search=True)
    assert output_error(weight, compensated, held_out) < 1.01 * output_error(weight, rounded, held_out)


def test_compensation_of_two_inputs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cpumoe.quantization.gptq.search_scales",
        lambda grouped, largest, dtype, _: plain_scales(grouped, largest, dtype),
    )
    # The two inputs are always the same, so that only the sum of their weights matters: what rounding takes from one
    # is given to the other, and 0.8 becomes 1. The third, never seen, makes the step 1.
    weight = torch.tensor([[100.4, 20.4, 127.5]])
    x = gaussian(512, 1) * torch.tensor([1.0, 1.0, 0.0])
    compensated = quantize_with_statistics(weight, statistics_of(x), Scheme.parse("w8a8"))
    values = compensated.values
    assert compensated.scales.tolist() == [[1.0]] and values[0, 2] == 127
    assert quantize_weight(weight, Scheme.parse("w8a8")).values.tolist() == [[100, 20, 127]]
    assert int(values[0, :2].sum()) == 121


@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_never_seen_are_rounded(name: str) -> None:
    scheme = Scheme.parse(name)
    weight, x = gaussian(16, 256, seed=3), correlated(512, 256, seed=2)
    x[:, 10:74] = 0
    compensated = quantize_with_statistics(weight, statistics_of(x), scheme)
    values, scales = compensated.values, compensated.scales
    assert_sound(weight, compensated, scheme)
    steps = scales.repeat_interleave(256 // scales.shape[1], 1)[:, 10:74]
    largest = scheme.weights.largest
    assert torch.equal(values[:, 10:74].float(), (weight[:, 10:74] / steps).round().clamp(-largest - 1, largest))
    rounded = quantize_weight(weight, scheme, clip_search=True)
    assert output_error(weight, compensated, x) < output_error(weight, rounded, x)


@pytest.mark.parametrize("name", SCHEMES)
def test_without_inputs_it_is_the_clip_search(name: str) -> None:
    scheme = Scheme.parse(name)
    weight = heavy_tailed(8, 256)
    expected = quantize_weight(weight, scheme, clip_search=True)
    for statistics in (InputStatistics(256), statistics_of(torch.zeros(300, 256))):
        assert same(quantize_with_statistics(weight, statistics, scheme), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_single_token_and_zero_weights(name: str) -> None:
    scheme = Scheme.parse(name)
    weight = gaussian(8, 256)
    weight[3] = 0
    weight[4, :128] = 0
    quantised = quantize_with_statistics(weight, statistics_of(gaussian(1, 256)), scheme)
    assert_sound(weight, quantised, scheme)
    assert not quantised.values[3].any()
    zero = torch.zeros(4, 256)
    quantised = quantize_with_statistics(zero, statistics_of(correlated(300, 256, seed=2)), scheme)
    assert not quantised.values.any() and torch.equal(quantised.scales, quantize_weight(zero, scheme).scales)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_are_of_the_dtype_of_the_plain_rule(dtype: torch.dtype) -> None:
    scheme = Scheme.parse("w4a8-g32")
    weight = gaussian(16, 64).to(dtype)
    x = correlated(512, 64, seed=2)
    quantised = quantize_with_statistics(weight, statistics_of(x), scheme)
    assert_sound(weight, quantised, scheme)
    assert output_error(weight, quantised, x) < output_error(weight, quantize_weight(weight, scheme), x)


def test_the_same_each_time_and_for_each_block() -> None:
    weight, statistics = gaussian(24, 192), statistics_of(correlated(512, 192, seed=2))
    before = weight.clone(), statistics.hessian.clone()
    for name in ("w4a8", "w4a8-g96"):
        scheme = Scheme.parse(name)
        first = quantize_with_statistics(weight, statistics, scheme)
        assert same(quantize_with_statistics(weight, statistics, scheme), first)
        for block in (1, 50, 1000):
            other = quantize_with_statistics(weight, statistics, scheme, block=block)
            # Sums in another order may turn a tie, and what follows from it.
            assert torch.equal(other.scales, first.scales)
            assert (other.values != first.values).float().mean() < 0.02
    assert torch.equal(weight, before[0]) and torch.equal(statistics.hessian, before[1])


def test_rows_are_shared_out_over_threads_that_pytorch_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, used = Scheme.parse("w4a8-g32"), []
    weight, statistics = torch.randn(300, 64), InputStatistics(64)
    statistics.add(torch.randn(MIN_TOKENS, 64))

    def watched(rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
        used.append((len(rows), torch.get_num_threads()))
        return search_scales(rows, *arguments)

    monkeypatch.setattr(gptq, "search_scales", watched)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 16):
            torch.set_num_threads(count)
            found.append(quantize_with_statistics(weight, statistics, scheme))
            assert torch.get_num_threads() == count, "what the caller has set stays"
    finally:
        torch.set_num_threads(threads)
    assert sorted(used) == sorted([(300, 1), *[(100, 1)] * 3, *[(75, 1)] * 4])  # no thread gets too few rows
    for other in found[1:]:
        assert torch.equal(other.values, found[0].values) and torch.equal(other.scales, found[0].scales)


def test_dependent_inputs_without_damping() -> None:
    x = gaussian(400, 4) @ gaussian(4, 64, seed=1)  # rank 4: no factor exists until something is added
    weight, scheme = gaussian(8, 64, seed=2), Scheme.parse("w4a8-g32")
    quantised = quantize_with_statistics(weight, statistics_of(x), scheme, damping=0.0)
    assert_sound(weight, quantised, scheme)
    assert output_error(weight, quantised, x) < 0.5 * output_error(weight, quantize_weight(weight, scheme), x)


def test_what_cannot_be_compensated_is_rounded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    scheme = Scheme.parse("w4a8-g32")
    overflowing = statistics_of(torch.full((300, 64), 1e30))
    indefinite = statistics_of(gaussian(1_000, 64))
    indefinite.hessian = torch.eye(64) + 1e6 * (1 - torch.eye(64))
    weight = gaussian(8, 64)
    huge = weight * (torch.finfo(torch.float32).max / weight.abs().max())
    sound = statistics_of(gaussian(400, 1).expand(400, 64) + 0.01 * gaussian(400, 64, seed=1))
    for case, statistics, reason in (
        (weight, overflowing, "the Hessian of its inputs cannot be factored"),
        (weight, indefinite, "the Hessian of its inputs cannot be factored"),
        (huge, sound, "error compensation overflows"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="cpumoe"):
            quantised = quantize_with_statistics(case, statistics, scheme, "down")
        assert [record.getMessage() for record in caplog.records] == [f"down: {reason}; rounded to nearest"]
        assert same(quantised, quantize_weight(case, scheme, clip_search=True))


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["w4a8", "w4a8-g32", "w8a8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outputs=st.integers(1, 5),
    groups=st.integers(1, 3),
    tokens=st.integers(0, 40),
    block=st.integers(1, 100),
    damping=st.sampled_from([0.0, 1e-6, 0.01, 10.0]),
    exponents=st.tuples(st.integers(-44, 37), st.integers(-44, 18)),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_size_gives_sound_results(
    name: str,
    dtype: torch.dtype,
    outputs: int,
    groups: int,
    tokens: int,
    block: int,
    damping: float,
    exponents: tuple[int, int],
    seed: int,
) -> None:
    scheme = Scheme.parse(name)
    inputs = groups * (scheme.group_size or 7)
    weight = (heavy_tailed(outputs, inputs, seed=seed).clamp(-9, 9).double() * 10.0 ** exponents[0]).to(dtype)
    x = heavy_tailed(tokens, inputs, seed=seed + 1).double() * 10.0 ** exponents[1]
    x[:, seed % inputs] = x[:, 0]
    statistics = statistics_of(x)
    assert_sound(weight, quantize_with_statistics(weight, statistics, scheme, damping=damping, block=block), scheme)


def test_bad_arguments_are_refused() -> None:
    scheme, statistics = Scheme.parse("w4a8-g32"), InputStatistics(64)
    weight = gaussian(4, 64)
    with pytest.raises(ValueError, match=r"up is \[2, 4, 64\]; \[out, in\] is accepted"):
        quantize_with_statistics(gaussian(2, 4, 64), statistics, scheme, "up")
    with pytest.raises(ValueError, match=r"up is \[4, 32\], statistics are of in_features=64; the same number"):
        quantize_with_statistics(gaussian(4, 32), statistics, scheme, "up")
    for damping in (-0.1, torch.nan, torch.inf):
        with pytest.raises(ValueError, match=rf"damping={damping}; zero or a positive finite number is accepted"):
            quantize_with_statistics(weight, statistics, scheme, damping=damping)
    with pytest.raises(ValueError, match=r"block=0; a positive number is accepted"):
        quantize_with_statistics(weight, statistics, scheme, block=0)
    with pytest.raises(ValueError, match=r"up holds NaN or infinity"):
        quantize_with_statistics(weight / 0, statistics, scheme, "up")
    with pytest.raises(ValueError, match=r"up is torch.int8"):
        quantize_with_statistics(weight.to(torch.int8), statistics, scheme, "up")
    for name in ("w4a16-g32-asym", "mxfp4a16", "nvfp4a16"):
        with pytest.raises(UnsupportedScheme, match=f"up: {name} cannot be calibrated; symmetric integers can"):
            quantize_with_statistics(weight, statistics, Scheme.parse(name), "up")
    with pytest.raises(UnsupportedScheme, match=r"up: group_size=128 does not divide in_features=64; use 32, 64"):
        quantize_with_statistics(weight, statistics, Scheme.parse("w4a8-g128"), "up")
