"""Packed weights are tensors: they survive files, pickling, memory maps, other processes; damaged ones are refused."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_layers import random_layer, routing
from safetensors.torch import load_file, save_file

import cpumoe
from cpumoe import ops
from cpumoe.layers.packed_weights import ExpertsPacker


def layer_and_call() -> tuple[cpumoe.Experts, tuple[torch.Tensor, ...], torch.Tensor]:
    experts = random_layer("w4a8-g32", bias=True).experts("native")
    ids, weights = routing(7, 4, 2)
    arguments = (torch.randn(7, 128), ids, weights)
    return experts, arguments, experts(*arguments)


def test_state_dict() -> None:
    experts, arguments, expected = layer_and_call()
    other = random_layer("w4a8-g32", bias=True).experts("native")
    assert not torch.equal(other(*arguments), expected)
    other.load_state_dict(experts.state_dict())
    assert torch.equal(other(*arguments), expected)


def test_torch_save_weights_only() -> None:
    experts, arguments, expected = layer_and_call()
    buffer = io.BytesIO()
    torch.save(experts.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert torch.equal(cpumoe.Experts.from_packed(**state, activation="silu")(*arguments), expected)


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


def test_pickle_to_another_process(tmp_path: Path) -> None:
    experts, arguments, expected = layer_and_call()
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
    )
    assert spec.packed_bytes == experts.gate_up_packed.numel() and spec.weight_format == "int4-g32"
    assert repr(spec) == (
        "PackedSpec(weights='int4', group_size=32, scales='bfloat16', experts=4, out_features=192, in_features=128, "
        "gated=True, has_bias=True)"
    )


def test_weights_of_another_version_are_refused_by_name() -> None:
    experts, *_ = layer_and_call()
    blob = experts.gate_up_packed.clone()
    blob[8] = 1
    with pytest.raises(ValueError, match="packed format version 1; this build reads version 2: pack the weights again"):
        ops.read_spec(blob)


def test_experts_in_any_order() -> None:
    layer = random_layer("w4a8-g32", bias=True, scale_dtype=torch.bfloat16)
    whole = layer.experts("native")
    plain = whole.quantized()
    packer = ExpertsPacker(whole.config)
    for expert in (2, 0, 3):
        packer.put(expert, plain.each(lambda t, e=expert: t[e : e + 1]))
    with pytest.raises(ValueError, match="experts 1 were not packed"):
        packer.finish()
    packer.put(1, plain.each(lambda t: t[1:2]))
    assert torch.equal(packer.finish()["gate_up_packed"], whole.gate_up_packed)
    assert torch.equal(packer.finish()["down_packed"], whole.down_packed)
    with pytest.raises(ValueError, match="1 experts from number 4 on, where 4 are packed"):
        packer.put(4, plain.each(lambda t: t[:1]))


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
