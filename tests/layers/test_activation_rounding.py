"""What activations become: the definitions by hand, their properties, and compressed-tensors beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpumoe import Scheme
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import (
    held_activations,
    input_scale_arguments,
    input_scale_for,
    needs_input_scales,
)
from cpumoe.layers.scheme import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    PER_TENSOR_FP8,
    PER_TOKEN_AND_128_FP8,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    SCHEMES,
    STATIC_FP8,
    STATIC_INT8,
    TensorFormat,
)

MX = {"mxfp4": MXFP4, "mxfp6-e3m2": MXFP6_E3M2, "mxfp6-e2m3": MXFP6_E2M3, "mxfp8": MXFP8}
DYNAMIC = {"fp8": PER_TOKEN_FP8, "fp8-tensor": PER_TENSOR_FP8, "fp8-g128": PER_TOKEN_AND_128_FP8, **MX}
STORED = {"fp8-static": STATIC_FP8, "int8-static": STATIC_INT8, "nvfp4": NVFP4}
ALL: dict[str, Any] = {**DYNAMIC, **STORED, "int8": PER_TOKEN_INT8, "int16": "int16", "float": None}
#: The largest error of a value, in shares of the largest magnitude that shares its scale: with m bits of mantissa half
#: a quantum, 2^-(m+1), of a power of two that is just exceeded by as much. For fp8 it is 16 of 448.
WORST = {"mxfp4": 1 / 5, "mxfp6-e3m2": 1 / 9, "mxfp6-e2m3": 1 / 17, "mxfp8": 1 / 17}
WORST |= {"fp8": 1 / 28, "fp8-tensor": 1 / 28}


def scale_of(name: str, x: Tensor) -> Tensor | None:
    schemes = {"fp8-static": "fp8-static", "int8-static": "w8a8-static", "nvfp4": "nvfp4"}
    return input_scale_for(x.abs().max(), Scheme.parse(schemes[name])) if name in STORED else None


def rows(tokens: int = 5, inputs: int = 256) -> Tensor:
    return torch.randn(tokens, inputs) * torch.randn(tokens, inputs).exp()


# ---- by hand ---------------------------------------------------------------------------------------------------------


def one_row(*values: float, inputs: int = 32) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (inputs - len(values))]])


@pytest.mark.parametrize(
    ("form", "scale", "given_values", "expected"),
    [
        # 448 is the largest: the scale is 1, and steps are 32 from 256 on, 2^-9 near zero.
        (PER_TOKEN_FP8, None, (448.0, 300.0, 272.0, 0.001, -3.3), (448.0, 288.0, 256.0, 0.001953125, -3.25)),
        (PER_TENSOR_FP8, None, (448.0, 300.0), (448.0, 288.0)),
        # Integers per token: 255 steps of 2^-126 are the smallest range that is not a row of zeros.
        (PER_TOKEN_INT8, None, (255 * 2.0**-126, 3.4 * 2.0**-126), (255 * 2.0**-126, 3 * 2.0**-126)),
        (PER_TOKEN_INT8, None, (-100 * 2.0**-126, 154 * 2.0**-126, 1e-37), (0.0, 0.0, 0.0)),
        ("int16", None, (-65535 * 2.0**-126, -3.4 * 2.0**-126), (-65535 * 2.0**-126, -3 * 2.0**-126)),
        ("int16", None, (65534 * 2.0**-126, 3.4 * 2.0**-126), (0.0, 0.0)),
        (PER_TOKEN_AND_128_FP8, None, (448.0, 300.0), (448.0, 288.0)),
        (STATIC_FP8, 2.0, (1000.0, 300.0, 0.001), (896.0, 288.0, 0.0)),
        (STATIC_INT8, 0.5, (1.25, 0.75, -0.25, 100.0, -100.0), (1.0, 1.0, 0.0, 63.5, -64.0)),
        # 6 takes the scale 1; 7 is rounded up to 8, whose scale is 2, and 2.9 is then 1.45 steps of it.
        (MXFP4, None, (6.0, 2.4, 2.5, -5.0, 0.25), (6.0, 2.0, 2.0, -4.0, 0.0)),
        (MXFP4, None, (7.0, 2.9), (8.0, 3.0)),
        (MXFP4, None, (6.99, 2.9), (6.0, 3.0)),
        (MXFP6_E2M3, None, (7.5, 0.2, 3.1), (7.5, 0.25, 3.0)),
        (MXFP6_E3M2, None, (28.0, 0.1, 9.1), (28.0, 0.125, 10.0)),
        # 1.75 times a power of two is rounded up to the next, so that the scale is 2, and 1 for less.
        (MXFP8, None, (448.0, 300.0, 0.0012), (448.0, 288.0, 0.0)),
        (MXFP8, None, (446.0, 300.0, 0.0012), (448.0, 288.0, 0.001953125)),
        # G = 448: the scale of a group with 6 is 448, a step 1; the group of 0.01 has 0.746, which is 0.75.
        (NVFP4, 448.0, (6.0, 2.4, -5.1, *[0.0] * 13, 0.01), (6.0, 2.0, -6.0, *[0.0] * 13, 6 * 0.75 * (1 / 448))),
        (None, None, (1e-30, 3e38), (1e-30, 3e38)),
    ],
)
def test_by_hand(form: Any, scale: float | None, given_values: tuple[float, ...], expected: tuple[float, ...]) -> None:
    given_scale = None if scale is None else torch.tensor([scale])
    found = reference.activations(one_row(*given_values), form, given_scale)
    torch.testing.assert_close(found, one_row(*expected), rtol=2e-7, atol=0)


def test_groups_have_scales_of_their_own() -> None:
    x = torch.cat((torch.full((1, 128), 448.0), torch.full((1, 40), 0.013)), 1)  # the last group is shorter
    alone = reference.activations(x[:, 128:], PER_TOKEN_FP8)
    assert torch.equal(reference.activations(x, PER_TOKEN_AND_128_FP8)[:, 128:], alone)
    assert not torch.equal(reference.activations(x, PER_TOKEN_FP8)[:, 128:], alone)


def test_tokens_share_a_scale_where_the_tensor_has_one() -> None:
    x = torch.stack((torch.full((32,), 448.0), torch.linspace(0, 1e-3, 32)))
    together = reference.activations(x, PER_TENSOR_FP8)
    assert together[1].unique().numel() == 2  # 0 and 2^-9: less than half a step becomes nothing
    assert torch.equal(reference.activations(x[1:], PER_TENSOR_FP8), reference.activations(x[1:], PER_TOKEN_FP8))


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_alone(name: str, poison: float) -> None:
    x = rows()
    scale = scale_of(name, x)
    x[2] = 0
    clean = reference.activations(x, ALL[name], scale)
    x[2, 7] = poison
    found = reference.activations(x, ALL[name], scale)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_no_tokens(name: str) -> None:
    scale = None if name not in STORED else torch.tensor([3.0])
    assert torch.equal(reference.activations(torch.zeros(3, 64), ALL[name], scale), torch.zeros(3, 64))
    assert reference.activations(torch.empty(0, 64), ALL[name], scale).shape == (0, 64)


@pytest.mark.parametrize("name", [*DYNAMIC, *STORED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_rounded_stays(name: str, dtype: torch.dtype) -> None:
    """Multiples of powers of two, so that scales come out the same the second time."""
    x = rows().to(dtype).float()
    x = torch.where(torch.arange(256) % 16 == 0, 6.0 * 2.0 ** torch.arange(5).unsqueeze(1), x.clamp(-5, 5))
    if name == "fp8-tensor" or name in STORED:
        x[:, ::16] = 6.0
    x = x * (448 / 6 if name.startswith("fp8") else 1)
    scale = {"fp8-static": torch.tensor([1.0]), "int8-static": torch.tensor([0.5]), "nvfp4": torch.tensor([448.0])}
    once = reference.activations(x, ALL[name], scale.get(name))
    assert torch.equal(reference.activations(once, ALL[name], scale.get(name)), once)
    assert once.dtype == torch.float32


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(WORST)),
    power=st.integers(-100, 100),
    spread=st.floats(0.01, 3.0),
)
def test_errors_are_within_half_a_quantum(seed: int, name: str, power: int, spread: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 64) * torch.exp(spread * torch.randn(4, 64)) * 2.0**power
    error = (reference.activations(x, ALL[name]).double() - x.double()).abs()
    size = {"fp8": 64, "fp8-tensor": 64}.get(name, 32)
    largest = x.abs().unflatten(-1, (-1, size)).amax(-1, keepdim=True).double()
    if name == "fp8-tensor":
        largest = largest.amax()
    assert bool((error.unflatten(-1, (-1, size)) <= largest * WORST[name] * 1.001).all())


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(DYNAMIC)), power=st.integers(-60, 60))
def test_powers_of_two_change_the_exponent_alone(seed: int, name: str, power: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 128)
    scaled = reference.activations(x * 2.0**power, DYNAMIC[name])
    assert torch.equal(scaled, reference.activations(x, DYNAMIC[name]) * 2.0**power)


@pytest.mark.parametrize("name", STORED)
def test_stored_scales_are_needed(name: str) -> None:
    for scale in (None, torch.ones(2), torch.ones(0)):
        with pytest.raises(ValueError, match="input scale .*; one number is accepted"):
            reference.activations(torch.ones(1, 32), STORED[name], scale)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(**{"dynamic": True, "symmetric": True, "type": "float", **changes})


THEIRS: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "strategy": "token"},
    "fp8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8-g128": {"num_bits": 8, "strategy": "group", "group_size": 128},
    "fp8-static": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
    "int8-static": {"num_bits": 8, "strategy": "tensor", "dynamic": False, "type": "int"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "mxfp6-e2m3": {"num_bits": 6, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "nvfp4": {
        **{"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        "scale_dtype": torch.float8_e4m3fn,
    },
}


@pytest.mark.parametrize("name", THEIRS)
def test_as_compressed_tensors_rounds(name: str) -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args, form = arguments(**THEIRS[name]), ALL[name]
    x = rows(inputs=384)
    scale = scale_of(name, x * 0.8)  # some are clamped
    global_scale = scale.reshape(1) if name == "nvfp4" and scale is not None else None
    if scale is not None and name != "nvfp4":
        theirs, zeros = scale.reshape(1), None
    else:
        # Per token, they have tokens in the second dimension.
        given_rows = x.unsqueeze(0) if name == "fp8" else x
        theirs, zeros = compute_dynamic_scales_and_zp(given_rows, args, torch.nn.Module(), global_scale)
        theirs, zeros = (theirs.squeeze(0), zeros.squeeze(0)) if name == "fp8" else (theirs, zeros)
    expected = fake_quantize(x, theirs, zeros, args, global_scale)
    found = reference.activations(x, form, scale)
    # With a global scale they divide where we multiply with the reciprocal: the last bits may differ.
    torch.testing.assert_close(found, expected, rtol=3e-7 if name == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize(("scheme", "args"), [("fp8-static", "fp8-static"), ("w8a8-static", "int8-static")])
def test_stored_scales_are_those_of_compressed_tensors(scheme: str, args: str) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    largest = torch.tensor([0.37, 12.0, 0.0, 3e-30])
    theirs, _ = calculate_qparams(-largest / 2, largest, arguments(**THEIRS[args]))
    assert torch.equal(input_scale_for(largest, Scheme.parse(scheme)), theirs)
    for number in (0.37, 12.0, 1e-3):
        whole = torch.tensor(number)
        assert input_scale_for(whole, Scheme.parse("nvfp4")) == generate_gparam(-whole / 2, whole)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_says_what_its_activations_are(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    held = held_activations(parsed)
    assert held in ALL.values() and (held is None or held == "int16" or isinstance(held, TensorFormat))
    stored = needs_input_scales(parsed)
    assert stored == (scheme.endswith("-static") or scheme in ("fp8-tensor", "nvfp4"))
    names = input_scale_arguments(parsed, 1.0, 2.0)
    assert len(names) == 2 * stored and all(("global" in name) == (scheme == "nvfp4") for name in names)
    if not stored:
        with pytest.raises(ValueError, match="stores no scale of its input"):
            input_scale_for(torch.ones(1), parsed)
