"""Every number that fp32 has, subnormal to largest: quantised rows, activations and scores against float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpumoe
from cpumoe import Scheme, _core, ops, select_experts
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations, smallest_range
from cpumoe.layers.scheme import PER_TOKEN_INT8

SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
ISAS = [entry.name for entry in cpumoe.instruction_sets() if entry.supported]

any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)


def grid() -> torch.Tensor:
    """Both signs of every power of two, of a value inside each, and what lies around the ends of exp and sigmoid."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128))
    ends = torch.tensor(
        [16.0, 17, 18, 36, 43.5, 86, 87, 88, 89, 95, 100, 103, 103.9, 104, 105, 150, 174, 207, 208, 209]
    )
    ends = torch.cat((ends, torch.nextafter(ends, ends + 1), torch.nextafter(ends, ends - 1))).double()
    values = torch.cat((powers, powers * 1.37, ends, torch.tensor([1e36, LARGEST], dtype=torch.float64)))
    return torch.cat((values, -values, torch.zeros(1))).clamp(-LARGEST, LARGEST).float()


# ---- rows ----------------------------------------------------------------------------------------------------------


def identity(size: int, bits: int) -> cpumoe.QuantizedLinear:
    """Gives back a row as it was quantised to 8 or 16 bits."""
    one = torch.eye(size, dtype=torch.int8)
    return cpumoe.QuantizedLinear.from_quantized(one, torch.ones(size, 1), f"w8a{bits}")


def on_every_isa(call, *arguments: object) -> torch.Tensor:
    """The result of the scalar kernel, after a look whether the others have its bits."""
    results = []
    for name in ISAS:
        _core.use_isa(name)
        results.append(call(*arguments))
    _core.use_isa("")
    for name, result in zip(ISAS, results, strict=True):
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32)), name
    return results[0]


def check_row(x: torch.Tensor, bits: int) -> None:
    row = x.unsqueeze(0)
    got = on_every_isa(identity(x.numel(), bits), row)[0]
    assert torch.equal(got, reference.activations(row, PER_TOKEN_INT8 if bits == 8 else "int16")[0])
    if x.max().clamp(min=0) - x.min().clamp(max=0) < smallest_range(bits):
        assert torch.equal(got, torch.zeros_like(got))
        return
    exact = x.double()
    step = float(exact.max().clamp(min=0) - exact.min().clamp(max=0)) / (2**bits - 1)
    # Half a step of the value and half of the zero point. At the very end of fp32 the nearest multiple of the step may
    # be infinite.
    assert (got.double().clamp(-LARGEST, LARGEST) - exact).abs().max() <= 1.01 * step


@settings(max_examples=300, deadline=None)
@given(st.lists(any_float, min_size=1, max_size=40), st.sampled_from([8, 16]))
def test_a_row_is_off_by_no_more_than_a_step(values: list[float], bits: int) -> None:
    check_row(torch.tensor(values), bits)


@pytest.mark.parametrize("high", [LARGEST, 2.0e38, 1e-30, 1e-33, 3.1e-36, 2.9e-36, 7.6e-37, 1e-38, 1e-40, SMALLEST])
@pytest.mark.parametrize("low", [0.0, -0.3, -1.0])
@pytest.mark.parametrize("bits", [8, 16])
def test_rows_of_every_range(high: float, low: float, bits: int) -> None:
    check_row(torch.linspace(low, 1.0, 100).double().mul(high).float(), bits)
    check_row(torch.linspace(1.0, low, 7).double().mul(-high).float(), bits)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_smallest_range(bits: int) -> None:
    """The limit is where the scale is 2^-126, both as the range by its steps and as the reciprocal of the factor."""
    limit, steps = torch.tensor(smallest_range(bits)), torch.tensor(2.0**bits - 1)
    below = torch.nextafter(limit, torch.tensor(0.0))
    for range_, is_tiny in ((below, True), (limit, False)):
        assert bool(range_ / steps < 2.0**-126) == bool(1 / (steps / range_) < 2.0**-126) == is_tiny
        for low, high in ((0.0, range_), (-range_, 0.0), (-range_ / 2, range_ / 2)):
            x = torch.tensor([[0.0, low, -0.0, high, high / 3]])
            linear = identity(5, bits)
            got = on_every_isa(linear, x)
            assert torch.equal(got, torch.zeros(1, 5)) == is_tiny
            check_row(x[0], bits)
            poisoned = torch.cat((x, x, x))
            poisoned[1, 2] = torch.nan
            out = on_every_isa(lambda rows, linear=linear: linear(rows).nan_to_num(7.0), poisoned)
            assert torch.equal(out, torch.cat((got, torch.full((1, 5), 7.0), got)))


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w4a16-g32", "w8a8", "w8a16", "w4a16-g32-asym", "mxfp4a16+int8"])
def test_rows_below_the_smallest_range_give_zeros(scheme: str) -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(24, 96), scheme, bias=torch.randn(24))
    held = held_activations(Scheme.parse(scheme))
    x = (torch.rand(20, 96) - 0.5) * smallest_range(16 if held == "int16" else 8) * 0.99
    assert torch.equal(linear(x), linear(torch.zeros(20, 96)))


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w4a16-g32", "w8a16", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16"])
def test_products_scale_with_their_row(scheme: str) -> None:
    """Powers of two change the exponent and nothing else, up to ranges that are no fp32 number."""
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(24, 96), scheme)
    x = torch.randn(5, 96).clamp(-1.9, 1.9)
    x[:, :2] = torch.tensor([-1.9, 1.9])
    for power in (-90, -60, 60, 126, 127):
        scaled = torch.ldexp(linear(x).double(), torch.tensor(power)).float()  # infinite where no fp32 number is left
        assert torch.equal(linear(torch.ldexp(x.double(), torch.tensor(power)).float()), scaled)
    assert scaled.isfinite().any()


# ---- activations ---------------------------------------------------------------------------------------------------


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.nn.functional.softplus(-x, threshold=1e9))


TRUTH = {
    "silu": lambda x: x * sigmoid(x),
    "swiglu_oai": lambda x: x.clamp(max=7.0) * sigmoid(1.702 * x.clamp(max=7.0)),
    "swiglu_step": lambda x: (x * sigmoid(x)).clamp(max=7.0),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x * sigmoid(1.5957691216057308 * (x + 0.044715 * x**3)),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", TRUTH)
def test_activations(activation: str, gated: bool) -> None:
    if not gated and activation.startswith("swiglu"):
        pytest.skip("always gated")
    experts = passing_through(activation, gated)
    x = grid()
    tokens = torch.zeros(x.numel(), 32)
    tokens[:, 0] = x  # a single value is quantised without loss, before the activation and after it
    ids, weights = torch.zeros(x.numel(), 1, dtype=torch.int32), torch.ones(x.numel(), 1)
    got = on_every_isa(experts, tokens, ids, weights)[:, 0].double()
    truth = TRUTH[activation](x.double())
    finite = truth.abs() <= LARGEST
    assert not got[~finite].isfinite().any()  # relu2 of more than 1.8e19 is no fp32 number
    # erf has an absolute error, the argument of gelu_tanh's sigmoid a relative one.
    cancelled = 4e-7 * x.double().abs().clamp(max=15.0) if activation == "gelu" else 0.0
    relative = 4e-5 if activation == "gelu_tanh" else 2e-5
    bound = relative * truth.abs() * (2 if activation == "relu2" else 1)
    # Rows below the smallest range are zeros, before the activation and after it.
    limit = smallest_range(8)
    assert not got[x.abs() < limit].any()
    assert activation == "gelu" or not got[truth.abs() < 0.999 * limit].any()
    near_zero = torch.where((x.abs() < limit) | (truth.abs() < 1.001 * limit), truth.abs(), 0.0)
    # The last 120: a sigmoid rounded to the smallest number, times an argument of -104.
    excess = (got - truth).abs() - (bound + near_zero + cancelled + 120 * SMALLEST)
    worst = torch.where(finite, excess, -1.0).argmax()
    assert excess[worst] <= 0, (x[worst], got[worst], truth[worst])


def passing_through(activation: str, gated: bool) -> cpumoe.Experts:
    """One expert of 32 inputs: the first goes through the activation; ``up`` is 1."""
    one = torch.eye(32, dtype=torch.int8)
    kind = cpumoe.Activation(activation, gated=gated)
    bias = torch.zeros(1, kind.gate_up_rows(32))
    if gated:
        bias[:, 32:] = 0.0 if activation == "swiglu_oai" else 1.0
    gate_up = torch.cat((one, torch.zeros_like(one))) if gated else one
    scale = torch.ones(1, gate_up.shape[0], 1)
    return cpumoe.Experts.from_quantized(
        gate_up[None], scale, one[None], torch.ones(1, 32, 1), "w8a8", gate_up_bias=bias, activation=kind
    )


def test_many_large_negative_gates_add_up_to_nothing() -> None:
    one = torch.ones(1, 32, 32, dtype=torch.int8)
    gate_up = torch.cat((torch.eye(32, dtype=torch.int8)[None], torch.zeros_like(one)), 1)
    bias = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), 1)
    layer = cpumoe.Experts.from_quantized(
        gate_up, torch.ones(1, 64, 1), one, torch.ones(1, 32, 1), "w8a8", gate_up_bias=bias
    )
    out = layer(torch.full((1, 32), -1e36), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    assert torch.equal(out, torch.zeros(1, 32))


# ---- scores --------------------------------------------------------------------------------------------------------


def log_scores(x: torch.Tensor, scoring: str) -> torch.Tensor:
    """Logarithms of the scores of fp32 logits, in float64 and without underflow."""
    x = x.double()
    if scoring == "softmax":
        return x
    if scoring == "sigmoid":
        return -torch.nn.functional.softplus(-x, threshold=1e9)
    positive = torch.nn.functional.softplus(x, threshold=1e9)
    return 0.5 * torch.where(x < -40, x, positive.log())


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_scores(scoring: str) -> None:
    logits = grid().unsqueeze(1)
    got = on_every_isa(
        lambda x: torch.ops.cpumoe.select_experts(x, 1, ops.SCORING[scoring], True, None, 0, 0, False, 1.0)[0], logits
    )
    truth = log_scores(logits, scoring).exp()
    error = (got.double() - truth).abs()
    assert bool((error <= 4e-7 * truth + SMALLEST).all()), logits[error.argmax()]
    order = logits.squeeze(1).argsort()
    assert bool((got.squeeze(1)[order].diff() >= -4e-7 * got.squeeze(1)[order][1:]).all())


def test_softmax_of_every_distance() -> None:
    distances = grid()
    pairs = torch.stack((torch.zeros_like(distances), distances), 1)
    got = on_every_isa(lambda x: select_experts(x, 2, "renormalize")[0], pairs)
    truth = pairs.double().softmax(1).sort(1, descending=True).values
    assert bool(((got.double() - truth).abs() <= 4e-7 * truth + 2e-38).all())


# Far enough apart for every score to tell them apart, were it not for underflow and saturation.
LOGITS = [
    *(-LARGEST, -1e36, -1e4, -1000.0, -745.5, -745.0, -300.0, -209.0, -208.5, -208.0, -207.0, -150.0, -105.0, -104.5),
    *(-104.0, -103.9, -103.5, -103.0, -100.01, -100.0, -95.0, -90.0, -88.5, -88.0, -87.5, -87.0, -86.0, -62.0, -50.0),
    *(-17.0, -1.0, -1e-3, 0.0, 1e-30, 1.0, 16.0, 17.5, 20.0, 36.0, 40.0, 88.0, 100.0, 1e36, LARGEST),
]
METHODS = [
    ("default", "softmax"),
    ("renormalize_naive", "softmax"),
    ("renormalize_naive", "sigmoid"),
    ("renormalize_naive", "sqrt_softplus"),
    ("deepseek_v3", "sigmoid"),
    ("deepseek_v3", "sqrt_softplus"),
]


@settings(max_examples=300, deadline=None)
@given(
    which=st.sampled_from(METHODS),
    values=st.lists(st.sampled_from(LOGITS), min_size=12, max_size=12, unique=True),
    topk=st.integers(1, 6),
    groups=st.sampled_from([None, 2, 3]),
    common_bias=st.sampled_from([None, 0.0, 0.25]),
    isa=st.sampled_from(ISAS),
)
def test_experts_are_chosen_and_weighted_as_without_underflow(
    which: tuple[str, str],
    values: list[float],
    topk: int,
    groups: int | None,
    common_bias: float | None,
    isa: str,
) -> None:
    method, scoring = which
    logits = torch.tensor([values])
    biased = common_bias is not None and groups is None  # the same for all: it changes no order
    _core.use_isa(isa)
    weights, ids = select_experts(
        logits,
        topk,
        method,
        scoring=scoring,
        correction_bias=torch.full((12,), common_bias) if biased else None,
        num_expert_group=groups,
        topk_group=None if groups is None else groups - 1,
    )
    _core.use_isa("")
    open_experts = range(12)
    if groups is not None:
        size = 12 // groups
        worst = min(range(groups), key=lambda g: max(logits[0, g * size : (g + 1) * size].tolist()))
        open_experts = [e for e in range(12) if e // size != worst]
    chosen = sorted(open_experts, key=lambda e: -logits[0, e].item())[:topk]
    assert ids[0].tolist() == chosen
    exact = log_scores(logits, scoring)[0]
    expected = exact[chosen].softmax(0) if method != "default" else exact.softmax(0)[chosen]
    assert bool(((weights[0].double() - expected).abs() <= 1e-5 * expected + 2e-10).all()), (weights, expected)


def test_very_small_scores_in_groups_with_a_bias() -> None:
    """A group is worth its two best: the second decides between (-95, -95) and (-94.9, -300)."""
    logits = torch.tensor([[-95.0, -95.0, -94.9, -300.0], [-300.0, -120.0, -110.0, -400.0]])
    options = {"correction_bias": torch.zeros(4), "num_expert_group": 2, "topk_group": 1}
    weights, ids = select_experts(logits, 2, "deepseek_v3", **options)
    assert ids.tolist() == [[0, 1], [2, 3]]
    assert weights.tolist() == [[0.5, 0.5], [1.0, 0.0]]


# ---- the mode of the processor -------------------------------------------------------------------------------------

MODES = """
import hashlib, itertools, torch, cpumoe
generator = torch.Generator().manual_seed(0)
def some(*shape):
    return torch.randn(*shape, generator=generator)
experts = cpumoe.Experts.quantize(some(4, 128, 64), some(4, 64, 64), "w4a8-g32")
linear = cpumoe.QuantizedLinear.quantize(some(40, 64), "w8a8")
x = some(70, 64) * 1e-35
x[::7] *= 1e-2  # counts as zeros
logits = some(70, 4) - 100
kv = some(2, 1, 2, 50, 64) * 1e-20
weights = torch.full((70, 2), 0.5) * 1e-3
_, ids = cpumoe.select_experts(some(70, 4), 2)
# All made before the mode changes: PyTorch's own products follow it.
scores, small_values = some(5, 64) * 1e-19, kv[1] * 1e-18
ten_times_less, subnormal = scores * 1e-1, torch.full((600, 64), 1e-39)
factors, one = torch.full((64,), 1e-38), torch.ones(64)
def digest():
    results = [
        experts(x, ids, weights),
        linear(x),
        *cpumoe.select_experts(logits, 2, "deepseek_v3", renormalize=False),
        torch.ops.cpumoe.decode_attention(kv[0, :, :, 0], kv[0], small_values, None, 1e-3),
        torch.ops.cpumoe.router_logits(scores, ten_times_less, None, True),
        torch.ops.cpumoe.rms_norm(x[:5], factors, 1.0, False),
        torch.ops.cpumoe.rms_norm(subnormal, one, 1.0, False),
    ]
    flush = 1.0e-39 * torch.ones(1) * 0.5 == 0
    return hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest(), bool(flush)
seen = {}
for flush, threads in itertools.product((False, True), (1, 2)):
    assert torch.set_flush_denormal(flush)
    cpumoe.set_num_threads(threads)
    seen[flush, threads] = digest()
print(seen)
assert len({bits for bits, _ in seen.values()}) == 1, seen
assert [flushed for _, flushed in seen.values()] == [False, False, True, True], "the caller's mode was not restored"
print("ok")
"""


def test_the_mode_of_the_calling_thread_changes_no_bit() -> None:
    done = subprocess.run([sys.executable, "-c", MODES], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.stdout.strip().endswith("ok"), done.stdout + done.stderr


def test_subnormal_results_are_kept() -> None:
    weights, ids = select_experts(torch.tensor([[-100.0, -90.0, -95.0]]), 3, "deepseek_v3", renormalize=False)
    assert ids.tolist() == [[1, 2, 0]]
    for weight, logit in zip(weights[0].tolist(), (-90.0, -95.0, -100.0), strict=True):
        assert abs(weight - math.exp(logit)) <= SMALLEST
