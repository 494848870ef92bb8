"""Bad input to the layer: an exception that names the argument, the value and what is accepted."""

from __future__ import annotations

import numpy
import pytest
import torch
from random_layers import global_scale, random_layer

import cpumoe
from cpumoe.layers.rounding import quantize_weight

BACKENDS = ("native", "aten", "reference")


def call(backend: str = "native", **changes: object) -> None:
    arguments: dict[str, object] = {
        "hidden_states": torch.randn(3, 128),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 0]]),
        "topk_weights": torch.full((3, 2), 0.5),
        **changes,
    }
    random_layer("w4a8-g32", scale_dtype=torch.bfloat16).experts(backend)(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.randn(3, 127)}, "hidden_states have 127 features, but gate_up takes 128"),
        ({"hidden_states": torch.randn(128)}, "hidden_states has 1 dimensions; 2 are accepted"),
        ({"hidden_states": torch.randn(1, 3, 128)}, "hidden_states has 3 dimensions; 2 are accepted"),
        (
            {"hidden_states": torch.randn(3, 128).double()},
            "hidden_states is .*float64; float32, bfloat16 or float16",
        ),
        ({"hidden_states": torch.ones(3, 128).int()}, "hidden_states is .*int32; float32"),
        (
            {"topk_ids": torch.tensor([[0, 1], [2, 4], [1, 0]])},
            r"topk_ids\[1, 1\]=4; 0 to 3 are experts and -1",
        ),
        (
            {"topk_ids": torch.tensor([[0, 1], [2, -2], [1, 0]]).int()},
            r"topk_ids\[1, 1\]=-2; 0 to 3 are experts",
        ),
        ({"topk_ids": torch.tensor([[0, 1], [2, 2**40], [1, 0]])}, "topk_ids.*1099511627776; 0 to 3 are experts"),
        ({"topk_ids": torch.zeros(2, 2).int()}, r"topk_ids \[2, 2\] do not have the 3 rows"),
        ({"topk_ids": torch.zeros(3).int()}, "topk_ids has 1 dimensions"),
        ({"topk_ids": torch.zeros(3, 2)}, "topk_ids is .*float32; int32 or int64 is accepted"),
        ({"topk_ids": torch.zeros(3, 2).short()}, "topk_ids is .*int16; int32 or int64 is accepted"),
        ({"topk_weights": torch.ones(3, 2).int()}, "topk_weights are torch.int32; a floating point"),
        ({"topk_weights": torch.zeros(3, 3)}, r"topk_weights \[3, 3\] and topk_ids \[3, 2\] differ"),
        ({"topk_weights": torch.zeros(3)}, "topk_weights has 1 dimensions"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_arguments(backend: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(backend, **changes)


def test_another_device_is_refused() -> None:
    layer = random_layer("w4a8-g32")
    layer.gate_up = layer.gate_up.to("meta")
    with pytest.raises(ValueError, match="gate_up is on meta; CPU tensors are accepted"):
        layer.experts("native")
    with pytest.raises(ValueError, match="down_bias is on meta"):
        random_layer("w4a8-g32").experts("native", down_bias=torch.zeros(4, 128, device="meta"))
    with pytest.raises((ValueError, RuntimeError, BufferError)):
        cpumoe._core.read_spec(torch.empty(100, dtype=torch.uint8, device="meta"))


def test_things_that_are_no_tensors() -> None:
    with pytest.raises(RuntimeError, match="argument 'hidden_states' but instead found type 'list'"):
        call(hidden_states=[[0.0] * 128])
    with pytest.raises(ValueError, match="is a str; a tensor or an array is accepted"):
        cpumoe._core.read_spec("bytes")
    with pytest.raises((TypeError, ValueError), match="None"):
        cpumoe._core.linear(None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: a.update(gate_up=a["gate_up"].float()),
            "gate_up is torch.float32; int8 values or uint8 nibbles",
        ),
        (lambda a: a.update(gate_up=a["gate_up"][0]), r"gate_up is \[192, 128\]; \[experts, out, in\]"),
        (lambda a: a.update(gate_up=a["gate_up"][:, :-2]), r"gate_up is \[4, 190, 128\]; .* \[4, 192, 128\]"),
        (lambda a: a.update(gate_up=a["gate_up"][:3]), r"gate_up is \[3, 192, 128\]"),
        (
            lambda a: a.update(gate_up_scale=a["gate_up_scale"][..., :1]),
            r"gate_up_scale is \[4, 192, 1\]; \[4, 192, 4\]",
        ),
        (lambda a: a.update(down_scale=a["down_scale"][:, :5]), r"down_scale is \[4, 5, 3\]; \[4, 128, 3\]"),
        (
            lambda a: a.update(down_scale=a["down_scale"].int()),
            "down_scale is torch.int32; float32, bfloat16 or float16",
        ),
        (lambda a: a.update(gate_up_bias=torch.zeros(4, 191)), r"gate_up_bias is \[4, 191\]; \[4, 192\]"),
        (lambda a: a.update(down_bias=torch.zeros(128)), r"down_bias is \[128\]; \[4, 128\]"),
        (lambda a: a.update(scheme="w4a8-g64"), "group_size=64 does not divide in_features=96; use 32"),
        (lambda a: a.update(activation="swish"), "activation 'swish' is not known"),
        (
            lambda a: a["gate_up"].view(-1)[7:8].fill_(8),
            "gate_up.* int4 value",
        ),
        (lambda a: a["down"].view(-1)[-1:].fill_(-9), r"down.* int4 value"),
        (lambda a: a["down_scale"].view(-1)[-1:].fill_(torch.nan), r"down.*scale.* is not finite"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_weights(backend: str, change: object, message: str) -> None:
    layer = random_layer("w4a8-g32", scale_dtype=torch.bfloat16)
    arguments: dict[str, object] = {
        "gate_up": layer.gate_up,
        "gate_up_scale": layer.gate_up_scale,
        "down": layer.down,
        "down_scale": layer.down_scale,
        "scheme": "w4a8-g32",
    }
    change(arguments)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        cpumoe.Experts.from_quantized(**arguments, backend=backend)


def test_the_packer_says_where() -> None:
    layer = random_layer("w4a8-g32")
    layer.gate_up[0, 0, 7] = 8
    with pytest.raises(ValueError, match=r"gate_up: value 8 at \[0, 0, 7\] is not an int4 value; -8 to 7"):
        layer.experts("native")
    layer.gate_up[0, 0, 7] = 0
    layer.down_scale[3, 127, 2] = torch.nan
    with pytest.raises(ValueError, match=r"down: scale at \[3, 127, 2\] is not finite"):
        layer.experts("native")


def test_unknown_options_fail() -> None:
    layer = random_layer("w4a8-g32")
    with pytest.raises(TypeError):
        layer.experts("native", group_size=32)
    with pytest.raises(TypeError):
        cpumoe.select_experts(torch.randn(2, 4), 2, renormalise=True)


def test_sizes_that_would_overflow() -> None:
    good = {"weights": "int4", "group_size": None, "scales": "float32", "experts": 4, "out_features": 64}
    good |= {"in_features": 64, "gated": False, "has_bias": False, "has_zero_points": False, "activations": "int8"}
    assert cpumoe._core.PackedSpec(**good).packed_bytes > 0
    for change, message in [
        ({"experts": 1 << 40}, "experts=1099511627776; 1 to 65536 are accepted"),
        ({"out_features": 1 << 40}, "out_features=1099511627776"),
        ({"in_features": 1 << 40}, "in_features=1099511627776"),
        ({"experts": -1}, "experts=-1"),
        ({"experts": 0}, "experts=0"),
        ({"out_features": 0}, "out_features=0"),
        ({"weights": "int5"}, "int5 weights are not known"),
        ({"scales": "float24"}, "scales=float24; accepted are float32, bfloat16, e8m0, e4m3, float16, none"),
        ({"group_size": -32}, "group_size=-32; a multiple of 32"),
        ({"group_size": 48}, "group_size=48; a multiple of 32"),
        ({"group_size": 128}, "group_size=128 does not divide in_features=64"),
        ({"weights": "int8", "has_zero_points": True}, "int8 activations do not go with weights held as int8-zero"),
        ({"weights": "fp4"}, "fp4 weights, group_size=0: there is no such format"),
        ({"weights": "fp4", "group_size": 64}, "fp4 weights, group_size=64: there is no such format"),
        ({"weights": "fp4", "group_size": 32}, "float32 scales do not go with weights held as fp4-g32"),
        ({"weights": "fp4", "group_size": 16, "scales": "e8m0"}, "do not go with weights held as fp4-g16"),
        ({"weights": "fp4", "group_size": 32, "scales": "e4m3"}, "do not go with weights held as fp4-g32"),
        ({"weights": "fp4", "group_size": 8, "scales": "e4m3"}, "group_size=8; a multiple of"),
        ({"scales": "e8m0"}, "e8m0 scales do not go with weights held as int4"),
        ({"activations": "float16"}, "activations=float16; accepted are int8, int16"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpumoe._core.PackedSpec(**(good | change))


def test_zero_rows_and_tiny_values() -> None:
    experts = random_layer("w4a8-g32", bias=True).experts("native")
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    zero = experts(torch.zeros(1, 128), ids, weights)
    assert zero.isfinite().all()
    for tiny in (1e-38, 1e-42, -1e-45):
        torch.testing.assert_close(experts(torch.full((1, 128), tiny), ids, weights), zero)
    # What such a row becomes between the two products is no fp32 number: as with infinity, the token is NaN and alone.
    wide = torch.zeros(2, 128)
    wide[0, ::2], wide[0, 1::2] = 3e38, -3e38
    out = experts(wide, ids.expand(2, 2), weights.expand(2, 2))
    assert out[0].isnan().all() and torch.equal(out[1:], zero)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory that begins one byte after a multiple of its element size."""
    data = bytearray(tensor.numel() * tensor.element_size() + 16)
    start = (1 - torch.frombuffer(data, dtype=torch.uint8).data_ptr()) % 8
    bytes_of = torch.frombuffer(data, dtype=torch.uint8)[start : start + len(data) - 16]
    bytes_of.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return torch.frombuffer(data, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "topk_weights"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_tensors_that_begin_between_two_elements_are_refused(name: str, ids: torch.dtype) -> None:
    arguments = {
        "hidden_states": torch.randn(3, 128),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 0]]).to(ids),
        "topk_weights": torch.full((3, 2), 0.5),
    }
    arguments[name] = misaligned(arguments[name])
    assert arguments[name].data_ptr() % arguments[name].element_size() == 1
    with pytest.raises(ValueError, match=rf"^{name} does not begin at a multiple of . bytes in memory; use its .clone"):
        call(**arguments)
    arguments[name] = arguments[name].clone()
    call(**arguments)


def test_other_operators_refuse_them_too() -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(32, 64), "w4a8-g32")
    x, kv = torch.randn(3, 64), torch.randn(1, 2, 5, 64)
    calls = [
        ("x", lambda: linear(misaligned(x))),
        ("x", lambda: linear(misaligned(x.bfloat16()))),
        ("router_logits", lambda: cpumoe.select_experts(misaligned(x), 2)),
        ("weight", lambda: torch.ops.cpumoe.rms_norm(x, misaligned(x[0]), 1e-6, True)),
        ("weight", lambda: torch.ops.cpumoe.router_logits(x, misaligned(x), None, True)),
        ("keys", lambda: torch.ops.cpumoe.decode_attention(x[:2].unsqueeze(0), misaligned(kv), kv, None, 1.0)),
        ("mask", lambda: torch.ops.cpumoe.decode_attention(x[:2].unsqueeze(0), kv, kv, misaligned(x[:1, :5]), 1.0)),
    ]
    for name, refused in calls:
        with pytest.raises(ValueError, match=r"does not begin at a multiple of . bytes in memory; use its .clone"):
            refused()
            pytest.fail(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_begin_between_two_elements_are_copied(dtype: torch.dtype) -> None:
    """Views into the bytes of a file may; they are packed once, so that a copy costs nothing."""
    layer = random_layer("w4a8-g32", bias=True, scale_dtype=dtype)
    expected = layer.experts("native")
    layer.gate_up_scale, layer.down_scale = misaligned(layer.gate_up_scale), misaligned(layer.down_scale)
    layer.gate_up_bias = misaligned(layer.gate_up_bias)
    got = layer.experts("native")
    assert torch.equal(got.gate_up_packed, expected.gate_up_packed)
    assert torch.equal(got.down_packed, expected.down_packed)


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("topk_group", [2**62, 2**63 - 1, -(2**63), 3])
def test_numbers_of_groups_that_would_overflow(groups: int, topk_group: int) -> None:
    with pytest.raises(ValueError, match=f"topk_group={topk_group}"):
        torch.ops.cpumoe.select_experts(torch.randn(2, 8), 2, 1, True, None, groups, topk_group, False, 1.0)


def test_sizes_that_only_an_empty_tensor_can_have() -> None:
    many = torch.empty(0, 2**62)
    with pytest.raises(ValueError, match=rf"topk_weights is \[0, {2**62}\]; sizes with a product of up to 2\^44"):
        call(hidden_states=torch.empty(0, 128), topk_ids=many.int(), topk_weights=many)


def test_results_are_not_written_into_read_only_memory() -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(4, 32), "w8a8")
    fixed = numpy.frombuffer(bytes(16), numpy.float32).reshape(1, 4)
    with pytest.raises(ValueError, match="out is read-only"):
        cpumoe._core.linear(torch.randn(1, 32), linear.weight_packed, fixed)


def test_packing_outside_the_experts() -> None:
    blob = random_layer("w8a8").experts("native").down_packed.clone()
    values, scales = torch.zeros(1, 128, 96, dtype=torch.int8), torch.ones(1, 128, 1)
    for first in (4, -1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"1 experts from number {first} on, where 4 are packed"):
            cpumoe._core.pack_into(blob, first, values, scales, None, None, None, None, None, 0, "w")


def with_value(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """A copy with another last element, given as its byte."""
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[-1] = value % 256
    return copy


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        *(
            ("w4a16-g32-asym", "down_zero_point", change, message)
            for change, message in (
                (lambda t: with_value(t, 8), r"down.*zero.point.*(8 at \[3, 127, 2\]|outside of).*-8 to 7"),
                (lambda t: with_value(t, -9), r"down.*zero.point.*(-9 at \[3, 127, 2\]|outside of).*-8 to 7"),
                (lambda t: t[:, 1:], r"down_zero_point is torch.int8 \[4, 127, 3\]; int8 \[4, 128, 3\] is accepted"),
                (lambda t: t[..., :1], r"down_zero_point is torch.int8 \[4, 128, 1\]; int8 \[4, 128, 3\]"),
                (lambda t: t[0], "down_zero_point is torch.int8 "),
                (lambda t: t.int(), "down_zero_point is torch.int32 "),
                (lambda t: (t + 8).to(torch.uint8), "down_zero_point is torch.uint8 "),
                (lambda t: t.float(), "down_zero_point is torch.float32 "),
                (lambda t: t.to("meta"), "down_zero_point is on meta; CPU tensors are accepted"),
                (lambda t: None, "down_zero_point is missing for w4a16-g32-asym"),
            )
        ),
        ("w4a16-g32", "gate_up_zero_point", lambda t: torch.zeros(4, 192, 4).char(), "gate_up_zero_point is not exp"),
        ("w4a8-g32", "down_zero_point", lambda t: torch.zeros(4, 128, 3).char(), "down_zero_point is not expected"),
        ("mxfp4a16", "down_zero_point", lambda t: torch.zeros(4, 128, 3).char(), "down_zero_point is not expected"),
        *(
            ("nvfp4a16", "gate_up_global_scale", change, f"gate_up_global_scale ?{message}")
            for change, message in (
                (lambda t: None, "is missing"),
                (lambda t: t[:3], r"is \[3\]; one number, \[4\] or \[4, 2\] is accepted"),
                (lambda t: t[:0], r"is \[0\]; one number, \[4\] or \[4, 2\] is accepted"),
                (lambda t: t.view(2, 2), r"is \[2, 2\]; one number, \[4\] or"),
                (lambda t: t.repeat(2), r"is \[8\]; one number, \[4\] or"),
                (lambda t: t.repeat(3).view(4, 3), r"is \[4, 3\]; one number, \[4\] or"),
                (lambda t: t.to("meta"), "is on meta"),
                *(
                    (lambda t, x=bad: t * torch.tensor([1.0, 1.0, 1.0, x]), r"\[3, 0\] is .*; a positive and finite")
                    for bad in (0.0, -1.0, torch.nan, torch.inf, 1e-44)
                ),
            )
        ),
        (
            "nvfp4a16",
            "down_global_scale",
            lambda t: torch.ones(4, 2),
            r"down_global_scale is \[4, 2\]; one number or \[4\] is accept",
        ),
        ("mxfp4a16", "down_global_scale", lambda t: torch.ones(4), "down_global_scale is not expected"),
        ("w4a16", "gate_up_global_scale", lambda t: torch.ones(4), "gate_up_global_scale is not expected"),
        ("mxfp4a16", "down_scale", lambda t: with_value(t, 255), r"down.*scale.*(NaN; 0 to 254|not finite)"),
        ("mxfp4a16", "down_scale", torch.Tensor.float, "down_scale is torch.float32; torch.uint8 is accepted"),
        ("mxfp4a16", "down_scale", torch.Tensor.char, "down_scale is torch.int8; torch.uint8 is accepted"),
        ("mxfp4a16", "gate_up_scale", lambda t: t[..., 1:], r"gate_up_scale is \[4, 192, 3\]; \[4, 192, 4\]"),
        ("nvfp4a16", "down_scale", lambda t: with_value(t, 0x7F), r"down.*scale.*(0 to 126|not finite)"),
        ("nvfp4a16", "down_scale", lambda t: with_value(t, 0xFF), r"down.*scale.*(0 to 126|not finite)"),
        ("nvfp4a16", "down_scale", lambda t: with_value(t, 0x80), r"down.*scale.*negative.*0 to 126"),
        ("nvfp4a16", "down_scale", lambda t: with_value(t, 0xB8), r"down.*scale.*negative.*0 to 126"),
        ("nvfp4a16", "down_scale", torch.Tensor.float, "down_scale is torch.float32; torch.float8_e4m3fn is accept"),
        ("nvfp4a16", "down_scale", lambda t: t.view(torch.uint8), "down_scale is torch.uint8; torch.float8_e4m3fn"),
        (
            "w4a16-g32",
            "down_scale",
            lambda t: t.to(torch.float8_e4m3fn),
            "is torch.float8_e4m3fn; float32, bfloat16 or",
        ),
        ("w4a16-g32", "down_scale", torch.Tensor.byte, "down_scale is torch.uint8; float32, bfloat16 or float16"),
        ("w4a16-g32", "down_scale", torch.Tensor.double, "down_scale is torch.float64; float32, bfloat16 or float16"),
        ("mxfp4a16", "down", lambda t: with_value(t, 16), r"down.* not a code of e2m1; 0 to 15 are accepted"),
        ("nvfp4a16", "gate_up", lambda t: with_value(t, -1), r"gate_up.* not a code of e2m1; 0 to 15 are accepted"),
        ("w4a16-g32-asym", "gate_up", lambda t: with_value(t, 8), "gate_up.* int4 value.*-8 to 7"),
        ("nvfp4a16", "gate_up", lambda t: t[0], r"gate_up is \[192, 128\]; \[experts, out, in\]"),
        ("w8a16", "down", lambda t: t.view(torch.uint8), r"gate_up is|down"),
    ],
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_parts_of_weights(backend: str, scheme: str, name: str, change: object, message: str) -> None:
    layer = random_layer(scheme)
    layer.experts(backend)  # is in order
    held = getattr(layer, name)
    setattr(layer, name, change(held))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        layer.experts(backend)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("nvfp4a16", {"global_scale": None}, "global_scale is missing for nvfp4a16"),
        ("nvfp4a16", {"global_scale": torch.ones(2)}, r"global_scale is \[2\]; one number or \[1\] is accepted"),
        ("nvfp4a16", {"global_scale": torch.ones(0)}, r"global_scale is \[0\]; one number or \[1\] is accepted"),
        ("nvfp4a16", {"global_scale": torch.ones(1, device="meta")}, "global_scale is on meta"),
        *(
            ("nvfp4a16", {"global_scale": bad}, "global_scale is .*; a positive and finite fp32 number with an inverse")
            for bad in (0, -2.0, torch.nan, torch.inf, 1e300, 1e-41)
        ),
        ("mxfp4a16", {"global_scale": 1.0}, "global_scale is not expected for mxfp4a16"),
        ("mxfp4a16", {"zero_point": torch.zeros(8, 3).char()}, "weight_zero_point is not expected for mxfp4a16"),
        ("w4a16-g32-asym", {"zero_point": None}, "weight_zero_point is missing for w4a16-g32-asym"),
        (
            "w4a16-g32-asym",
            {"zero_point": torch.full((8, 3), 8).char()},
            r"weight: zero point 8 at \[0, ., .\]; -8 to 7",
        ),
        (
            "w4a16-g32-asym",
            {"zero_point": torch.zeros(8, 2).char()},
            r"weight_zero_point is torch.int8 \[8, 2\]; int8 \[8, 3\]",
        ),
        (
            "w4a16-asym",
            {"zero_point": torch.zeros(7).char()},
            r"weight_zero_point is torch.int8 \[7, 1\]; int8 \[8, 1\]",
        ),
        ("w8a16", {"weight": torch.zeros(8, 48).byte()}, "weight must be int8 for 8-bit weights"),
        (
            "mxfp4a16",
            {"weight": torch.zeros(8, 80).char()},
            "does not divide in_features=80; for mxfp4a16 a multiple of 32",
        ),
        (
            "nvfp4a16",
            {"weight": torch.zeros(8, 41).char()},
            "does not divide in_features=41; for nvfp4a16 a multiple of 16",
        ),
        ("nvfp4a16", {"weight": torch.tensor(1).char()}, r"weight is \[\]; \[out, in\] is accepted"),
    ],
)
def test_wrong_parts_of_a_linear(scheme: str, change: dict[str, object], message: str) -> None:
    weight = quantize_weight(torch.randn(8, 96), cpumoe.Scheme.parse(scheme))
    good = {"weight": weight.values, "scale": weight.scales, "zero_point": weight.zero_points}
    good["global_scale"] = global_scale(weight)
    cpumoe.QuantizedLinear.from_quantized(**good, scheme=scheme)
    with pytest.raises(ValueError, match=message):
        cpumoe.QuantizedLinear.from_quantized(**{**good, **change}, scheme=scheme)


def test_the_seam_knows_which_parts_belong_to_a_format() -> None:
    values, codes = torch.zeros(1, 8, 32, dtype=torch.int8), torch.ones(1, 8, 1, dtype=torch.uint8)
    scales, zeros, factors = torch.ones(1, 8, 1), torch.zeros(1, 8, 1, dtype=torch.int8), torch.ones(1, 8)

    def pack(weights: str, scales: torch.Tensor, zero_points: object = None, factors: object = None) -> object:
        return torch.ops.cpumoe.pack(values, scales, None, 32, 32, weights, 0, "w", zero_points, factors, "int16")

    pack("int4", scales, zeros)
    pack("fp4", codes, None, factors)
    for arguments, message in [
        (("int8", scales, zeros), "int16 activations do not go with weights held as int8-zero-g32"),
        (("int4", scales, zeros.int()), "w_zero_point is int32; int8 is accepted"),
        (("int4", scales, zeros[:, :7]), r"w_zero_point is \[1, 7, 1\]; \[1, 8, 1\] is accepted"),
        (("int4", scales, zeros[0]), "w_zero_point has 2 dimensions"),
        (("int4", scales, None, factors), "w_factor is not expected"),
        (("fp4", scales), "float32 scales do not go with weights held as fp4-g32"),
        (("int4", codes), "e8m0 scales do not go with weights held as int4-g32"),
        (("fp4", codes, zeros), "fp4 weights with zero points"),
        (("fp4", codes, None, factors[:, :7]), r"w_factor is \[1, 7\]; \[1, 8\] is accepted"),
        *(
            (("fp4", codes, None, factors * bad), "factor of row 0 of expert 0 is not a positive number that fp32 can")
            for bad in (0.0, -1.0, torch.nan, torch.inf)
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            pack(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_fp32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    """transformers sets the default dtype while it loads a model."""
    codes, scale = (
        torch.randint(0, 16, (32, 32)).char(),
        torch.full((32, 2), 56).to(torch.uint8).view(torch.float8_e4m3fn),
    )
    expected = cpumoe.QuantizedLinear.from_quantized(codes, scale, "nvfp4a16", global_scale=torch.tensor(123456.789))
    torch.set_default_dtype(dtype)
    try:
        found = cpumoe.QuantizedLinear.from_quantized(codes, scale, "nvfp4a16", global_scale=123456.789)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.weight_packed, expected.weight_packed)
