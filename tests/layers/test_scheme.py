"""Schemes and activations are values: parsed, printed, compared, refused when illegal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layers import INT16_ROWS, SCHEMES

import cpumoe
from cpumoe import Activation, GroupShape, Scheme, TensorFormat, UnsupportedScheme
from cpumoe.layers.scheme import PER_TOKEN_INT8


@pytest.mark.parametrize(
    "name", ["w4a8-g128", "w4a8-g2048", "w4a16+int8", "w8a16-g128+int8", "w4a16-g128-asym", "mxfp4a16+int8", *SCHEMES]
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
        *("w8a16-g48", "w4a8-asym", "w8a8-asym", "w8a16-asym", "w8a16-g32-asym", "w4a16-asym-g32", "w4a16-sym"),
        *("mxfp4", "mxfp4a8", "mxfp4a16-g32", "nvfp4", "nvfp4a4", "nvfp4a16-asym", "mxfp4a16-asym", "fp4a16"),
        *("w4a8+int8", "w8a8-g32+int8", "w4a16+int4", "w4a16+", "w4a16+int8+int8", "+int8", "nvfp4a16 +int8"),
    ],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedScheme):
        Scheme.parse(name)


_PARTS = ["w", "4", "8", "a8", "a16", "-g", "32", "48", "-asym", "mxfp4", "nvfp4", "+int8", "0"]


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
    with pytest.raises(UnsupportedScheme, match="element 'int5'; int4 and int8 and fp4 are accepted"):
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
        with pytest.raises(UnsupportedScheme, match="groups of 32 with e8m0 scales .mxfp4. and of 16 with e4m3"):
            TensorFormat("fp4", group, **options)
    with pytest.raises(UnsupportedScheme, match="e8m0 scales with int8; floating point scales are accepted"):
        TensorFormat("int8", GroupShape.per_group(32), scale="e8m0")
    nvfp4 = TensorFormat("fp4", sixteen, scale="e4m3")
    with pytest.raises(UnsupportedScheme, match="fp4 weights with int8 activations; ask for these instead"):
        Scheme(nvfp4, PER_TOKEN_INT8)
    with pytest.raises(UnsupportedScheme, match="blocks of 16 rows"):
        Scheme(TensorFormat("fp4", GroupShape(16, 16), scale="e4m3"), None)
    with pytest.raises(UnsupportedScheme, match="asymmetric int8 weights with 16-bit activations; asymmetric int4"):
        Scheme(TensorFormat("int8", whole, symmetric=False), None)
    with pytest.raises(UnsupportedScheme, match="scales that are found when they are seen"):
        Scheme(TensorFormat("int4", whole, dynamic=True), None)
    with pytest.raises(UnsupportedScheme, match="on request"):
        Scheme(TensorFormat("int4", whole), PER_TOKEN_INT8, PER_TOKEN_INT8)


def test_int8_activations_on_request() -> None:
    for name in INT16_ROWS:
        scheme = Scheme.parse(name)
        asked = scheme.with_int8_activations()
        assert (scheme.activation_bits, asked.activation_bits) == (16, 8)
        assert str(asked) == f"{name}+int8" and Scheme.parse(str(asked)) == asked != scheme
        assert asked.with_int8_activations() == asked and asked.weights == scheme.weights
    static = Scheme.parse("w4a8-g32")
    assert static.with_int8_activations() is static and static.activation_bits == 8


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
