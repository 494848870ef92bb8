"""Packed weights are tensors: they survive files, pickling, memory maps, other processes; damaged ones are refused."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_layers import SCHEMES, fitting, linear_inputs, random_layer, routing
from safetensors.torch import load_file, save_file
from sampling import first_of

import cpumoe
from cpumoe import ops
from cpumoe.layers.packed_weights import ExpertsPacker, scheme_of

KINDS = ["w4a8-g32", "w8a8-g32", "w4a16", "w8a16-g32", "w4a16-g32-asym", "w4a16-asym+int8", "mxfp4a16", "nvfp4a16+int8"]
KINDS += [
    "w8a8-static",
    "w8a16-g32-asym",
    "w4afp8-g32",
    "fp8",
    "fp8-static",
    "fp8-block",
    "nvfp4",
    "mxfp4a8",
    "mxfp6-e2m3",
]
KINDS += ["mxfp8a16", "bf16"]


def layer_and_call(scheme: str = "w4a8-g32") -> tuple[cpumoe.Experts, tuple[torch.Tensor, ...], torch.Tensor]:
    experts = random_layer(scheme, inner=fitting(scheme, 96), bias=True).experts("native")
    ids, weights = routing(7, 4, 2)
    arguments = (torch.randn(7, 128), ids, weights)
    return experts, arguments, experts(*arguments)


def test_state_dict() -> None:
    experts, arguments, expected = layer_and_call()
    other = random_layer("w4a8-g32", bias=True).experts("native")
    assert not torch.equal(other(*arguments), expected)
    other.load_state_dict(experts.state_dict())
    assert torch.equal(other(*arguments), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_another_scheme_are_refused(assign: bool) -> None:
    """Blobs of the same size, which PyTorch would copy; the layer keeps its weights."""
    experts, other = (random_layer(scheme).experts("native") for scheme in ("w4a8-g32", "w4a16-g32"))
    linear, other_linear = (cpumoe.QuantizedLinear.quantize(torch.randn(64, 64), s) for s in ("w8a8", "w8a16"))
    for mine, state in ((experts, other.state_dict()), (linear, other_linear.state_dict())):
        before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"holds w\da16.* expected w\da8"):
            mine.load_state_dict(state, assign=assign)
        assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())
    with pytest.raises(RuntimeError, match="gate_up_packed"):
        experts.load_state_dict({"gate_up_packed": torch.zeros(3, dtype=torch.uint8)}, strict=False)


@pytest.mark.parametrize("scheme", KINDS)
def test_torch_save_weights_only(scheme: str) -> None:
    experts, arguments, expected = layer_and_call(scheme)
    buffer = io.BytesIO()
    torch.save(experts.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    again = cpumoe.Experts.from_packed(**state, activation="silu")
    assert torch.equal(again(*arguments), expected)
    assert again.config == experts.config


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_compute_the_same(scheme: str) -> None:
    size = fitting(scheme, 192)
    layer = random_layer(scheme, hidden=size, inner=size, bias=True).experts("native")
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(40, size), scheme, torch.randn(40), **linear_inputs(scheme))
    x = torch.randn(5, size)
    ids, weights = routing(5, 4, 2)
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert again.config == layer.config and torch.equal(again(x, ids, weights), layer(x, ids, weights))
    again = pickle.loads(pickle.dumps(linear))
    assert str(again.scheme) == scheme and torch.equal(again(x), linear(x))
    # A scale for the tensor is packed as one for each row, which computes the same.
    by_rows = {"fp8-tensor": "fp8-static", "fp8-tensor-token": "fp8", "fp8a16-tensor": "fp8a16"}
    assert str(cpumoe.QuantizedLinear(linear.weight_packed.clone()).scheme) == by_rows.get(scheme, scheme)


def test_safetensors_and_memory_map(tmp_path: Path) -> None:
    experts, arguments, expected = layer_and_call()
    # A name of odd length leaves the data at any offset: packed weights need no alignment.
    for padding in ("", "x", "xyz"):
        path = tmp_path / f"layer{padding}.safetensors"
        save_file({**experts.state_dict(), f"a{padding}": torch.zeros(1, dtype=torch.uint8)}, path)
        state = load_file(path)
        again = cpumoe.Experts.from_packed(state["gate_up_packed"], state["down_packed"], activation="silu")
        assert torch.equal(again(*arguments), expected)
    path = tmp_path / "gate_up.bin"
    path.write_bytes(b"?" + bytes(experts.gate_up_packed.numpy()))
    mapped = torch.from_file(str(path), size=experts.gate_up_packed.numel() + 1, dtype=torch.uint8)[1:]
    assert torch.equal(cpumoe.Experts.from_packed(mapped, experts.down_packed, activation="silu")(*arguments), expected)


@pytest.mark.parametrize("scheme", first_of(["w4a8-g32", "w4a16-g32-asym", "nvfp4a16"], 1))
def test_pickle_to_another_process(scheme: str, tmp_path: Path) -> None:
    experts, arguments, expected = layer_and_call(scheme)
    path = tmp_path / "layer.pickle"
    path.write_bytes(pickle.dumps((experts, arguments, expected)))
    code = (
        "import pickle, sys, torch, pathlib\n"
        "experts, arguments, expected = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "assert torch.equal(experts(*arguments), expected)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_shared_memory_between_processes() -> None:
    experts, arguments, expected = layer_and_call()
    experts.share_memory()
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert torch.equal(pool.apply(call, (experts, arguments)), expected)


def call(experts: cpumoe.Experts, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return experts(*arguments)


def test_a_header_says_what_is_inside() -> None:
    experts = random_layer("w4a8-g32", bias=True, scale_dtype=torch.bfloat16).experts("native")
    spec = ops.read_spec(experts.gate_up_packed)
    assert spec == ops.PackedSpec(
        weights="int4",
        group_size=32,
        scales="bfloat16",
        experts=4,
        out_features=192,
        in_features=128,
        gated=True,
        has_bias=True,
        has_zero_points=False,
        activations="int8",
    )
    assert spec.packed_bytes == experts.gate_up_packed.numel() and spec.weight_format == "int4-g32"
    assert repr(spec) == (
        "PackedSpec(weights='int4', group_size=32, scales='bfloat16', experts=4, out_features=192, in_features=128, "
        "gated=True, has_bias=True, has_zero_points=False, input_orders=0, input_scales=0, activations='int8')"
    )


@pytest.mark.parametrize(
    ("scheme", "form", "bits", "scales", "zero_points", "factors", "activations"),
    [
        ("w4a8", "int4", 4, "float32", False, False, "int8"),
        ("w8a8-g96", "int8-g32", 8, "float32", False, False, "int8"),
        ("w4a16-g192", "int4-g64", 4, "float32", False, False, "int16"),
        ("w8a16", "int8", 8, "float32", False, False, "int16"),
        ("w4a16-asym", "int4-zero-g128", 4, "float32", True, False, "int16"),
        ("w4a16-g32-asym+int8", "int4-zero-g32", 4, "float32", True, False, "int8"),
        ("mxfp4a16", "fp4-g32", 4, "e8m0", False, True, "int16"),
        ("nvfp4a16+int8", "fp4-g16", 4, "e4m3", False, True, "int8"),
    ],
)
def test_headers_of_every_kind(
    scheme: str, form: str, bits: int, scales: str, zero_points: bool, factors: bool, activations: str
) -> None:
    spec = ops.read_spec(random_layer(scheme, hidden=192, inner=192).experts("native").down_packed)
    assert (spec.weight_format, spec.weight_bits, spec.scales) == (form, bits, scales)
    assert (spec.has_zero_points, spec.has_factors, spec.activations) == (zero_points, factors, activations)
    assert spec.group_size == cpumoe.Scheme.parse(scheme).group_size
    assert scheme_of(spec) == cpumoe.Scheme.parse(scheme)


def test_specs_that_differ_are_not_equal() -> None:
    facts = {"weights": "int4", "group_size": 32, "scales": "float32", "experts": 1, "out_features": 32}
    facts |= {"in_features": 32, "gated": False, "has_bias": False, "has_zero_points": False, "activations": "int8"}
    spec = ops.PackedSpec(**facts)
    assert spec == ops.PackedSpec(**facts) and hash(spec) == hash(ops.PackedSpec(**facts))
    others = {
        "has_zero_points": True,
        "activations": "int16",
        "scales": "bfloat16",
        "weights": "int8",
        "has_bias": True,
    }
    for key, value in others.items():
        other = ops.PackedSpec(**{**facts, key: value})
        assert other != spec and getattr(other, key) == value and repr(value) in repr(other)


def test_weights_of_another_version_are_refused_by_name() -> None:
    experts, *_ = layer_and_call()
    blob = experts.gate_up_packed.clone()
    blob[8] = 1
    with pytest.raises(ValueError, match="packed format version 1; this build reads version 2: pack the weights again"):
        ops.read_spec(blob)


@pytest.mark.parametrize(
    "scheme", ["w4a8-g32", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16", "nvfp4", "fp8-tensor", "bf16"]
)
def test_experts_in_any_order(scheme: str) -> None:
    layer = random_layer(scheme, bias=True, scale_dtype=torch.bfloat16)
    whole = layer.experts("native")
    plain = whole.quantized()
    packer = ExpertsPacker(whole.config)
    for expert in (2, 0, 3):
        packer.put(expert, plain[expert : expert + 1])
    with pytest.raises(ValueError, match="experts 1 were not packed"):
        packer.finish()
    packer.put(1, plain[1:2])
    assert torch.equal(packer.finish()["gate_up_packed"], whole.gate_up_packed)
    assert torch.equal(packer.finish()["down_packed"], whole.down_packed)
    with pytest.raises(ValueError, match="1 experts from number 4 on, where 4 are packed"):
        packer.put(4, plain[:1])


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "magic", "version", "size", "noise"])
def test_damaged_bytes_are_refused(damage: str) -> None:
    experts, arguments, _ = layer_and_call()
    blob = experts.gate_up_packed.clone()
    if damage == "truncated":
        blob = blob[:-1]
    elif damage == "longer":
        blob = torch.cat((blob, blob[:64]))
    elif damage == "empty":
        blob = blob[:0]
    elif damage == "noise":
        blob = torch.randint(0, 256, blob.shape, dtype=torch.uint8)
    else:
        blob[{"magic": 0, "version": 8, "size": 40}[damage]] ^= 0xFF
    with pytest.raises(ValueError, match=r"bytes|signature|version|damaged"):
        cpumoe.Experts.from_packed(blob, experts.down_packed, activation="silu")
    with pytest.raises(ValueError, match=r"bytes|signature|version|damaged"):
        torch.ops.cpumoe.fused_experts(*arguments, blob, experts.down_packed, 0, True, 1.7, 7.0, False)


def test_blobs_that_do_not_belong_together_are_refused() -> None:
    experts, arguments, _ = layer_and_call()
    fewer = random_layer("w4a8-g32", experts=3).experts("native")
    other_group = random_layer("w4a8").experts("native")
    other_size = random_layer("w4a8-g32", inner=64).experts("native")
    with pytest.raises(ValueError, match="experts=4, down_packed 3"):
        cpumoe.Experts.from_packed(experts.gate_up_packed, fewer.down_packed, activation="silu")
    with pytest.raises(ValueError, match="group_size"):
        cpumoe.Experts.from_packed(experts.gate_up_packed, other_group.down_packed, activation="silu")
    with pytest.raises(ValueError, match=r"gate_up_packed is \[192, 128\]; .* \[128, 128\] is accepted"):
        cpumoe.Experts.from_packed(experts.gate_up_packed, other_size.down_packed, activation="silu")
    for swapped in ((experts.down_packed, experts.gate_up_packed), (experts.gate_up_packed, experts.gate_up_packed)):
        with pytest.raises(ValueError, match="do not fit the activation silu"):
            cpumoe.Experts.from_packed(*swapped, activation="silu")
    with pytest.raises(ValueError, match="do not fit the activation relu2"):
        cpumoe.Experts.from_packed(experts.gate_up_packed, experts.down_packed, activation="relu2")
    for gate_up, down, message in [
        (experts.gate_up_packed, other_size.down_packed, "down takes 64 inputs, but gate_up gives 96"),
        (experts.gate_up_packed, fewer.down_packed, "gate_up holds 4 experts, down holds 3"),
        (experts.down_packed, experts.down_packed, "features|without gate"),
        (experts.gate_up_packed, experts.gate_up_packed, "down was packed with gate and up rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            torch.ops.cpumoe.fused_experts(*arguments, gate_up, down, 0, True, 1.7, 7.0, False)
    with pytest.raises(ValueError, match="not of a linear"):
        cpumoe.QuantizedLinear(experts.gate_up_packed)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("w4a16-g32", "w4a8-g32", "gate_up_packed has activations=int16, down_packed int8"),
        ("w4a8-g32", "w4a16-g32", "gate_up_packed has activations=int8, down_packed int16"),
        ("mxfp4a16", "mxfp4a16+int8", "gate_up_packed has activations=int16, down_packed int8"),
        ("w4a16-g32-asym", "w4a16-g32", "gate_up_packed has has_zero_points=True, down_packed False"),
        ("w4a16-asym", "w4a16", "gate_up_packed has has_zero_points=True, down_packed False"),
        ("mxfp4a16", "w4a16-g32", "gate_up_packed has weights=fp4, down_packed int4"),
        ("mxfp4a16", "nvfp4a16", "gate_up_packed has group_size=32, down_packed 16"),
        ("w8a16", "w4a16", "gate_up_packed has weights=int8, down_packed int4"),
        ("w8a8-g32", "w8a8", "gate_up_packed has group_size=32, down_packed None"),
    ],
)
def test_blobs_of_two_schemes_are_refused(one: str, other: str, message: str) -> None:
    first, second = random_layer(one).experts("native"), random_layer(other).experts("native")
    with pytest.raises(ValueError, match=message):
        cpumoe.Experts.from_packed(first.gate_up_packed, second.down_packed, activation="silu")
    ids, weights = routing(2, 4, 2)
    call = (torch.randn(2, 128), ids, weights, first.gate_up_packed, second.down_packed, 0, True, 1.7, 7.0, False)
    if "activations" in message:  # the rows of both products have one form
        with pytest.raises(ValueError, match="packed for activations of different kinds"):
            torch.ops.cpumoe.fused_experts(*call)
    else:
        assert torch.ops.cpumoe.fused_experts(*call).isfinite().all()


def test_weights_for_other_activations_are_not_taken_for_int8_ones() -> None:
    """The operator that others call has int8 activations and int4 weights without zero points, whatever it is given."""
    for scheme, key in (("w4a16-g32", "activations=int16"), ("w4a16-g32-asym+int8", "has_zero_points=True")):
        experts = random_layer(scheme).experts("native")
        ids, weights = routing(2, 4, 2)
        with pytest.raises(ValueError, match=f"gate_up_packed was packed with {key}, but the call says"):
            torch.ops.cpumoe.dynamic_4bit_int_moe(
                *(torch.randn(2, 128), ids, weights, experts.gate_up_packed, experts.down_packed),
                *(128, 96, 192, 32, False, 0),
            )


def test_a_packing_that_fails_leaves_nothing_to_use() -> None:
    spec = ops.PackedSpec(
        weights="int4",
        group_size=None,
        scales="bfloat16",
        experts=2,
        out_features=32,
        in_features=32,
        gated=False,
        has_bias=False,
        has_zero_points=False,
        activations="int8",
    )
    builder = ops.PackedBuilder(spec)
    values, scales = torch.ones(2, 32, 32, dtype=torch.int8), torch.ones(2, 32, 1, dtype=torch.bfloat16)
    builder.put(0, values, scales, None, ops.ROWS_PLAIN, "w")
    builder.finish()
    values[0, 31, 31] = 9
    with pytest.raises(ValueError, match="is not an int4 value"):
        builder.put(0, values, scales, None, ops.ROWS_PLAIN, "w")
    with pytest.raises(ValueError, match="experts 0, 1 were not packed"):
        builder.finish()
    with pytest.raises(ValueError, match="w_scale is float32; bfloat16 is accepted"):
        builder.put(0, values, scales.float(), None, ops.ROWS_PLAIN, "w")
    assert spec != None and spec != 1 and len({spec, ops.read_spec(builder._blob)}) == 1  # noqa: E711
