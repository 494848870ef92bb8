"""Schemes and activations are values: parsed, printed, compared, refused when illegal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpumoe
from cpumoe import Activation, GroupShape, Scheme, TensorFormat, UnsupportedScheme
from cpumoe.layers.scheme import PER_TOKEN_INT8


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-g96", "w4a8-g128", "w4a8-g2048", "w8a8"])
def test_names_round_trip(name: str) -> None:
    assert str(Scheme.parse(name)) == name
    assert Scheme.parse(name) == Scheme.parse(name)
    assert Scheme.parse(Scheme.parse(name)) == Scheme.parse(name)


@pytest.mark.parametrize(
    "name",
    ["", "w4", "w4a8-", "w4a8-g", "w4a8-g0", "w4a8-g48", "w4a8-g-32", "w8a8-g128", "w5a8", "W4A8", "w4a8 "],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedScheme):
        Scheme.parse(name)


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
    with pytest.raises(UnsupportedScheme, match="per channel"):
        Scheme(TensorFormat("int8", GroupShape.per_group(32)), PER_TOKEN_INT8)
    with pytest.raises(UnsupportedScheme, match="activations"):
        Scheme(TensorFormat("int4", GroupShape.per_row()), TensorFormat("int8", GroupShape.per_tensor()))
    with pytest.raises(UnsupportedScheme, match="symmetric"):
        Scheme(TensorFormat("int4", GroupShape.per_row(), symmetric=False), PER_TOKEN_INT8)
    with pytest.raises(UnsupportedScheme, match="positive"):
        GroupShape(0, 1)
    with pytest.raises(UnsupportedScheme, match="element 'int5'; int4 and int8 are accepted"):
        TensorFormat("int5", GroupShape.per_row())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedScheme, match="scheme 4 is not known"):
        Scheme.parse(4)  # type: ignore[arg-type]


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
