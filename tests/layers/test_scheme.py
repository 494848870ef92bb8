"""Schemes and activations are values: parsed, printed, compared, refused when illegal."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layers import INT16_ROWS, SCHEMES, WEIGHT_ONLY_FLOATS

import cpumoe
from cpumoe import Activation, GroupShape, Scheme, TensorFormat, UnsupportedScheme
from cpumoe.layers import scheme as schemes
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.scheme import (
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    PER_TENSOR_FP8,
    PER_TENSOR_INT8,
    PER_TOKEN_AND_128_FP8,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    STATIC_FP8,
    STATIC_INT8,
    stored_format,
)


@pytest.mark.parametrize(
    "name",
    [
        "w4a8-g128",
        "w4a8-g2048",
        "w4a16+int8",
        "w8a16-g128+int8",
        "w4a16-g128-asym",
        "mxfp4a16+int8",
        *SCHEMES,
        *schemes.SCHEMES,
    ],
)
def test_names_round_trip(name: str) -> None:
    assert str(Scheme.parse(name)) == name
    assert Scheme.parse(name) == Scheme.parse(name)
    assert Scheme.parse(Scheme.parse(name)) == Scheme.parse(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "w4",
            "w4a8-",
            "w4a8-g",
            "w4a8-g0",
            "w4a8-g48",
            "w4a8-g-32",
            "w5a8",
            "W4A8",
            "w4a8 ",
            "w4a4",
            "w4a16-g16",
        ),
        *(
            "w8a16-g48",
            "w4a8-asym",
            "w8a8-asym",
            "w4a16-asym-g32",
            "w4a16-sym",
            "w8afp8",
            "w4afp8-asym",
            "w8a16-static",
        ),
        *(
            "w8a16-static",
            "w4a8-static",
            "w8a8-g32-static",
            "w8a8-asym-static",
            "w4afp8-asym-static",
            "w8a8-static+int8",
        ),
        *("mxfp4a16-g32", "nvfp4a4", "nvfp4a16-asym", "mxfp4a16-asym", "fp4a16", "mxfp6", "mxfp6-e4m1", "mxfp8-g32"),
        *("w8a16-asym+int8",),
        *("fp8-g128", "fp8a16+int8", "fp8-block+int8", "bf16+int8", "bf16a8", "fp64", "mxfp4+int8", "fp8-blocka16"),
        *("w4a8+int8", "w8a8-g32+int8", "w4a16+int4", "w4a16+", "w4a16+int8+int8", "+int8", "nvfp4a16 +int8"),
    ],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedScheme):
        Scheme.parse(name)


_PARTS = ["w", "4", "8", "a8", "a16", "-g", "32", "48", "-asym", "mxfp4", "nvfp4", "+int8", "0", "afp8", "-static"]
_PARTS += ["fp8", "-tensor", "-block", "mxfp6", "-e2m3", "bf16"]


@given(st.lists(st.sampled_from(_PARTS), max_size=7).map("".join))
def test_any_name_of_parts_parses_or_is_refused(text: str) -> None:
    try:
        assert str(Scheme.parse(text)) == text
    except UnsupportedScheme as refusal:
        assert repr(text) in str(refusal) or "accepted" in str(refusal) or "ask for" in str(refusal)


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        assert str(Scheme.parse(text)) == text
    except UnsupportedScheme as refusal:
        assert "accepted" in str(refusal) or "per channel" in str(refusal)


def test_facts_of_a_scheme() -> None:
    scheme = Scheme.parse("w4a8-g64")
    assert (scheme.weights.bits, scheme.weights.largest, scheme.group_size) == (4, 7, 64)
    assert scheme.weights.group.scale_shape(10, 256) == (10, 4)
    assert Scheme.parse("w8a8").weights.group == GroupShape.per_row()
    assert scheme.activations == PER_TOKEN_INT8
    assert GroupShape.per_tensor().scale_shape(10, 256) == (1, 1)


def test_illegal_combinations_are_refused_when_made() -> None:
    blocks = TensorFormat("int4", GroupShape(128, 128))
    with pytest.raises(UnsupportedScheme, match="blocks of 128 rows do not go with per-token"):
        Scheme(blocks, PER_TOKEN_INT8)
    assert str(Scheme(TensorFormat("int8", GroupShape.per_group(32)), PER_TOKEN_INT8)) == "w8a8-g32"
    with pytest.raises(UnsupportedScheme, match="activations"):
        Scheme(TensorFormat("int4", GroupShape.per_row()), TensorFormat("int8", GroupShape.per_tensor()))
    with pytest.raises(UnsupportedScheme, match="symmetric"):
        Scheme(TensorFormat("int4", GroupShape.per_row(), symmetric=False), PER_TOKEN_INT8)
    with pytest.raises(UnsupportedScheme, match="positive"):
        GroupShape(0, 1)
    with pytest.raises(UnsupportedScheme, match="element 'int5'; int4, int8, fp4, .*fp32 are accepted"):
        TensorFormat("int5", GroupShape.per_row())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedScheme, match="scheme 4 is not known"):
        Scheme.parse(4)  # type: ignore[arg-type]


def test_illegal_4_bit_floats_are_refused_when_made() -> None:
    sixteen, whole = GroupShape.per_group(16), GroupShape.per_row()
    for group, options in (
        (whole, {}),
        (sixteen, {}),
        (sixteen, {"scale": "e8m0"}),
        (GroupShape.per_group(32), {"scale": "e4m3"}),
        (GroupShape.per_group(32), {"scale": "e8m0", "symmetric": False}),
    ):
        with pytest.raises(UnsupportedScheme, match="groups of 32 with e8m0 scales .mxfp4. and groups of 16 with"):
            TensorFormat("fp4", group, **options)
    with pytest.raises(UnsupportedScheme, match="e8m0 scales with int8; floating point scales are accepted"):
        TensorFormat("int8", GroupShape.per_group(32), scale="e8m0")
    nvfp4 = TensorFormat("fp4", sixteen, scale="e4m3")
    with pytest.raises(UnsupportedScheme, match="fp4 weights with int8 activations .*; ask for these instead"):
        Scheme(nvfp4, PER_TOKEN_INT8)
    with pytest.raises(UnsupportedScheme, match="fp4 in groups of 16 x 16 with e4m3 scales; groups of 32"):
        TensorFormat("fp4", GroupShape(16, 16), scale="e4m3")
    with pytest.raises(UnsupportedScheme, match="scales that are found when they are seen"):
        Scheme(TensorFormat("int4", whole, dynamic=True), None)
    with pytest.raises(UnsupportedScheme, match="on request"):
        Scheme(TensorFormat("int4", whole), PER_TOKEN_INT8, PER_TOKEN_INT8)


def test_int8_activations_on_request() -> None:
    for name in INT16_ROWS:
        scheme = Scheme.parse(name)
        asked = scheme.with_int8_activations()
        assert (scheme.product_activations, asked.product_activations) == (None, PER_TOKEN_INT8)
        assert (held_activations(scheme), held_activations(asked)) == ("int16", PER_TOKEN_INT8)
        assert str(asked) == f"{name}+int8" and Scheme.parse(str(asked)) == asked != scheme
        assert asked.with_int8_activations() == asked and asked.weights == scheme.weights
    static = Scheme.parse("w4a8-g32")
    assert static.with_int8_activations() is static and static.product_activations == PER_TOKEN_INT8
    for name in WEIGHT_ONLY_FLOATS:
        scheme = Scheme.parse(name)
        assert scheme.product_activations is None is held_activations(scheme) and not scheme.takes_int8_activations
        with pytest.raises(UnsupportedScheme, match="on request, where the scheme has .* accepted"):
            scheme.with_int8_activations()


@pytest.mark.parametrize(
    ("name", "scale_shape", "activations"),
    [
        ("fp8", (256, 1), PER_TOKEN_FP8),
        ("fp8-static", (256, 1), STATIC_FP8),
        ("fp8-tensor", (1, 1), STATIC_FP8),
        ("fp8-tensor-dynamic", (1, 1), PER_TENSOR_FP8),
        ("fp8-tensor-token", (1, 1), PER_TOKEN_FP8),
        ("fp8-block", (2, 3), PER_TOKEN_AND_128_FP8),
        ("fp8a16-block", (2, 3), None),
        ("nvfp4", (256, 24), NVFP4),
        ("mxfp4a8", (256, 12), schemes.MXFP8),
        ("mxfp4afp8", (256, 12), PER_TOKEN_FP8),
        ("mxfp4afp8-static", (256, 12), STATIC_FP8),
        ("mxfp4a6-e3m2", (256, 12), MXFP6_E3M2),
        ("mxfp4a6-e2m3", (256, 12), MXFP6_E2M3),
        ("mxfp6-e3m2afp8", (256, 12), PER_TOKEN_FP8),
        ("mxfp6-e2m3afp8-static", (256, 12), STATIC_FP8),
        ("w4afp8-g128-static", (256, 3), STATIC_FP8),
        ("mxfp6-e3m2", (256, 12), schemes.MXFP6_E3M2),
        ("w8a8-static", (256, 1), STATIC_INT8),
        ("w4afp8-g128", (256, 3), PER_TOKEN_FP8),
        ("bf16", (256, 0), None),
    ],
)
def test_scales_and_activations(name: str, scale_shape: tuple[int, int], activations: TensorFormat | None) -> None:
    scheme = Scheme.parse(name)
    assert scheme.weights.scale_shape(256, 384) == scale_shape
    assert scheme.product_activations == scheme.activations == activations


def test_illegal_floats_are_refused_when_made() -> None:
    fp8, rows = TensorFormat("fp8", GroupShape.per_row()), GroupShape.per_row()
    for element, group, options, said in (
        (
            "fp8",
            GroupShape.per_group(64),
            {},
            "fp8 in groups of 1 x 64 with float scales; rows and a tensor and",
        ),
        ("fp8", GroupShape(64, 64), {}, "fp8 in groups of 64 x 64"),
        ("fp8", rows, {"symmetric": False}, "asymmetric fp8"),
        ("fp8", rows, {"scale": "e8m0"}, "fp8 in groups of 1 x all with e8m0"),
        ("fp6-e2m3", rows, {}, r"fp6-e2m3 .*; groups of 32 with e8m0 scales \(mxfp6\), symmetric, are accepted"),
        ("bf16", rows, {}, "bf16 with scales or zero points; neither is accepted"),
        ("fp32", GroupShape.per_tensor(), {}, "fp32 with scales"),
    ):
        with pytest.raises(UnsupportedScheme, match=said):
            TensorFormat(element, group, **options)  # type: ignore[arg-type]
    for weights, activations, said in (
        (fp8, PER_TOKEN_AND_128_FP8, "fp8 weights with fp8 activations .*; fp8, fp8-static"),
        (fp8, PER_TOKEN_INT8, "fp8 weights with int8 activations"),
        (TensorFormat("fp8", GroupShape.per_block(128, 128)), PER_TOKEN_FP8, "fp8 weights with fp8 activations"),
        (
            TensorFormat("bf16", GroupShape.per_tensor(), scale="none"),
            PER_TOKEN_FP8,
            "bf16 weights .*; bf16 are",
        ),
        (TensorFormat("int8", rows), PER_TOKEN_FP8, "int8 weights with fp8 activations; int4 weights .w4afp8."),
        (TensorFormat("int4", rows), STATIC_INT8, "int4 weights with int8 activations of a stored scale; int8 weights"),
        (TensorFormat("int8", GroupShape.per_group(32)), STATIC_INT8, "per channel .w8a8-static. are accepted"),
        (TensorFormat("int4", rows), NVFP4, "nvfp4 activations with int4 weights; int8 or fp8, per token"),
        (stored_format(MXFP6_E2M3), MXFP8, r"fp6-e2m3 weights with fp8 .*groups \(mxfp6-e2m3 and mxfp8\); mxfp6-e2m3"),
        (fp8, PER_TENSOR_INT8, r"in these groups \(fp8 per channel and int8 with one dynamic scale\); fp8, fp8-stati"),
        (TensorFormat("fp8", GroupShape.per_block(128, 128)), STATIC_FP8, "fp8 in 128x128 blocks and fp8 with"),
    ):
        with pytest.raises(UnsupportedScheme, match=said):
            Scheme(weights, activations)


def test_refused_pairs_are_described_in_words() -> None:
    """No representation of a Python object is in a message, whichever formats are paired."""
    served = [Scheme.parse(name) for name in schemes.SCHEMES]
    weights = {scheme.weights for scheme in served} | {TensorFormat("int8", GroupShape(128, 128))}
    activations = {scheme.activations for scheme in served} | {
        PER_TENSOR_INT8,
        PER_TENSOR_FP8,
        TensorFormat("int8", GroupShape.per_row(), dynamic=True),
        TensorFormat("int8", GroupShape.per_row()),
        TensorFormat("bf16", GroupShape.per_tensor(), scale="none"),
    }
    refused = 0
    for weight, activation, requested in itertools.product(weights, activations, (None, PER_TOKEN_INT8, MXFP8)):
        try:
            Scheme(weight, activation, requested)
        except UnsupportedScheme as problem:
            assert not re.search(r"[(=]None|None[),]|Format|Shape|=", str(problem)), problem
            refused += 1
    assert refused > 500


def test_a_group_that_does_not_divide_names_the_cure() -> None:
    with pytest.raises(UnsupportedScheme, match=r"group_size=128 does not divide in_features=2880; use 32, 64"):
        cpumoe.MoEConfig(Scheme.parse("w4a8-g128"), 4, 2880, 2880)


def test_activations() -> None:
    assert Activation("swiglu") == Activation("silu")
    assert Activation("silu").gate_up_rows(96) == 192
    assert Activation("relu2").gate_up_rows(96) == 96
    assert Activation("relu2", gated=True).gate_up_rows(96) == 192
    assert Activation("gelu_no_mul") == Activation("gelu", gated=False)
    with pytest.raises(ValueError, match="has no gate"):
        Activation("silu_no_mul", gated=True)
    with pytest.raises(ValueError, match="swish.*accepted are silu"):
        Activation("swish")
    with pytest.raises(ValueError, match="needs a gate"):
        Activation("swiglu_oai", gated=False)
    with pytest.raises(ValueError, match="limit"):
        Activation("swiglu_step", limit=0)
