"""What the core is asked for and given, for every scheme: activations, scales by rows, numbers of input scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_layers import random_layer

from cpumoe import Scheme, ops
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.packed_weights import packed_activations, packed_spec, put_weight, scheme_of, unpack_weight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import SCHEMES

#: Schemes that packed weights do not tell from others that compute the same.
TOLD_AS = {"fp8-tensor": "fp8-static", "fp8-tensor-token": "fp8", "fp8a16-tensor": "fp8a16"}


def told(name: str) -> str:
    scheme = Scheme.parse(name)
    if scheme.requested is not None and scheme.weights.symmetric and scheme.weights.element != "fp4":
        return name.removesuffix("+int8").replace("a16", "a8")
    return TOLD_AS.get(name, name)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scheme_of_a_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PackedSpec", SimpleNamespace)
    scheme = Scheme.parse(name)
    spec: Any = packed_spec(scheme, torch.bfloat16, 4, 256, 384)
    assert str(scheme_of(spec)) == told(name)
    assert spec.input_scales == needs_input_scales(scheme) and spec.weights == scheme.weights.element
    scales = {"float": "float32" if "block" in name else "bfloat16"}
    assert spec.scales == scales.get(scheme.weights.scale, scheme.weights.scale)
    assert packed_spec(scheme, torch.bfloat16, 4, 256, 384, input_scales=2).input_scales == 2


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        *(("w4a8", "int8"), ("w8a8-static", "int8-static"), ("w4a16-g32-asym", "int16"), ("w8a16", "int16")),
        *(("w8a16-asym", "float"), ("w4afp8", "fp8"), ("fp8", "fp8"), ("fp8-static", "fp8-static")),
        *(("fp8-tensor", "fp8-static"), ("fp8-tensor-dynamic", "fp8-tensor"), ("fp8-block", "fp8-g128")),
        *(("fp8a16-block", "float"), ("nvfp4", "nvfp4"), ("nvfp4a16", "int16"), ("nvfp4a16+int8", "int8")),
        *(("mxfp4", "mxfp4"), ("mxfp4a16", "int16"), ("mxfp4a8", "mxfp8"), ("mxfp4afp8", "fp8")),
        *(("mxfp6-e3m2", "mxfp6-e3m2"), ("mxfp6-e2m3", "mxfp6-e2m3"), ("mxfp6-e2m3a16", "float")),
        *(("mxfp8", "mxfp8"), ("mxfp8a16", "float"), ("bf16", "float"), ("fp32", "float")),
    ],
)
def test_names_of_activations(name: str, activations: str) -> None:
    assert packed_activations(Scheme.parse(name)) == activations


BY_ROWS = [("fp8-block", 300, 3), ("fp8-block", 64, 3), ("fp8-tensor", 300, 1), ("bf16", 300, 0)]


@pytest.mark.parametrize(("name", "out", "groups"), BY_ROWS)
def test_scales_are_given_by_rows(name: str, out: int, groups: int) -> None:
    weight = quantize_weight(torch.randn(2, out, 384).bfloat16(), Scheme.parse(name))
    asked: dict[str, Any] = {}
    spec = SimpleNamespace(group_size=Scheme.parse(name).group_size)

    def put(first: int, values: torch.Tensor, scales: torch.Tensor, *_: object, **__: object) -> None:
        asked.update(values=values, scales=scales)

    put_weight(SimpleNamespace(put=put, spec=spec), 0, weight, ops.ROWS_PLAIN, "w")  # type: ignore[arg-type]
    assert asked["scales"].shape == (2, out, groups) and asked["values"] is weight.values
    assert asked["scales"].dtype == (torch.bfloat16 if name == "fp8-tensor" else torch.float32)
    if groups:
        rows = torch.arange(out) // (128 if "block" in name else 300)
        assert torch.equal(asked["scales"], weight.scales[:, rows].to(asked["scales"].dtype))


@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-block", "mxfp8", "nvfp4", "mxfp6-e3m2", "w8a16-asym"])
def test_native_weights_come_back_as_they_were(name: str) -> None:
    layer = random_layer(name, hidden=256, inner=128, bias=True)
    held, plain = layer.experts("native").quantized(1, 2), layer.experts("reference").quantized(1, 2)
    for one, other in ((held.gate_up, plain.gate_up), (held.down, plain.down)):
        for part in ("values", "scales", "zero_points", "factors", "bias", "input_order", "input_scales"):
            found, expected = getattr(one, part), getattr(other, part)
            assert (found is None) == (expected is None), part
            if found is not None:
                assert found.dtype == expected.dtype and found.shape == expected.shape, part
                assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), part
    blob = layer.experts("native").get_buffer("down_packed")
    assert unpack_weight(blob).values.shape == (4, 256, 128)
