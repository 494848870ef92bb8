"""Ranks that hold parts of experts in activation order, whose groups of inputs lie anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_checkpoints import (
    COUNT,
    HIDDEN,
    ORDERED,
    PREFIX,
    Layer,
    assert_close,
    bytes_of_slice,
    exact_sum,
    one_thread,
    per_expert_layout,
    routed,
    same_bits,
    write_folder,
    write_layer,
)
from safetensors.torch import load_file
from torch import Tensor

from cpumoe import CheckpointError
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import find_experts
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.layers.activation import KINDS, Activation
from cpumoe.layers.experts_parts import part_of_experts
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import apply_activation, dequantize
from cpumoe.layers.regrouping import Regrouping, regrouped_size

ALL = tuple(range(COUNT))
INNER = 384  # slices of 192 and of 96, which no group of 64 or 128 divides


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def written(folder: Path, form: str, inner: int = INNER, activation: str = "silu", has_bias: bool = False) -> Layer:
    section, store, _ = ORDERED[form]
    layout = per_expert_layout(inner, activation=activation, has_bias=has_bias)
    return write_layer(folder / "layer", section, store, layout)


@pytest.mark.parametrize("form", ORDERED)
def test_experts_of_all_ranks_are_those_of_the_layer(tmp_path: Path, form: str) -> None:
    layer = written(tmp_path, form)
    whole, all_bytes = layer.load()
    read = 0
    for part in (ExpertsPart((2, 0)), ExpertsPart((1,))):
        experts, count = layer.load(part)
        assert experts.config.scheme == whole.config.scheme
        same_bits(experts.quantized(), part_of_experts(whole.quantized(), part, gated=True))
        read += count
    assert read == all_bytes


def expected_bytes(layer: Layer, slices: int, *, symmetric: bool) -> int:
    """Of ``down`` the scales and zero points are read whole, and the groups of inputs twice: sizes depend on them."""
    total = 0
    for name, tensor in load_file(layer.folder / "model.safetensors").items():
        size, suffix = prod(tensor.shape) * tensor.element_size(), name.rpartition(".")[2]
        is_down, is_order = "down_proj" in name, suffix.endswith("g_idx")
        is_transposed = suffix in ("qweight", "qzeros", "scales")
        if suffix == "weight_shape" or (suffix == "qzeros" and symmetric):
            total += size  # compared, and not decoded
        elif is_order:
            total += 2 * size // slices if is_down else size
        elif is_down and suffix != "qweight" and suffix != "weight_packed":
            total += size
        else:
            total += bytes_of_slice(tensor, int(is_down != is_transposed), slices)
    return total


@pytest.mark.parametrize("form", ORDERED)
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_add_up_to_the_layer(tmp_path: Path, form: str, slices: int) -> None:
    layer = written(tmp_path, form)
    whole, _ = layer.load()
    inputs, total, each = routed(), torch.zeros(5, HIDDEN), INNER // slices
    groups = INNER // ORDERED[form][2]
    for index in range(slices):
        part = ExpertsPart(ALL, slices, index)
        experts, count = layer.load(part)
        assert experts.config.scheme.group_size == 32
        assert each <= experts.config.intermediate_size <= each + 31 * groups
        held = experts.quantized()
        assert held.down.input_order is None
        same_bits(held, part_of_experts(whole.quantized(), part, gated=True))
        total += exact_sum(experts, inputs)
        assert count == expected_bytes(layer, slices, symmetric="asymmetric" not in form)
    assert_close(total, exact_sum(whole, inputs))


@pytest.mark.parametrize("activation", [*KINDS, "silu_no_mul"])
def test_rows_that_fill_up_add_nothing_whatever_the_activation(tmp_path: Path, activation: str) -> None:
    kind = Activation(activation)
    zeros = torch.zeros(1, kind.gate_up_rows(32))
    assert not bool(apply_activation(zeros, kind).any())
    layer = written(tmp_path, "GPTQ, asymmetric", 128, activation, has_bias=True)
    whole, _ = layer.load()
    inputs, total = routed(), torch.zeros(5, HIDDEN)
    for index in range(2):
        experts, _ = layer.load(ExpertsPart(ALL, 2, index))
        total += exact_sum(experts, inputs)
        kernels = experts(*inputs, fp32_out=True)
        assert float((kernels - experts.reference(*inputs)).norm() / kernels.norm()) < 1e-3
    assert_close(total, exact_sum(whole, inputs))


def test_experts_that_are_held_decide_on_the_size(tmp_path: Path) -> None:
    layer = written(tmp_path, "GPTQ")
    sizes = [layer.load(ExpertsPart((expert,), 2, 1))[0].config.intermediate_size for expert in ALL]
    assert layer.load(ExpertsPart((2, 0, 2), 2, 1))[0].config.intermediate_size == max(sizes[0], sizes[2])


# ---- the sorting alone -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    group_count=st.integers(1, 9),
    inputs=st.integers(1, 200),
    asymmetric=st.booleans(),
    more=st.integers(0, 2),
)
def test_any_groups(seed: int, group_count: int, inputs: int, asymmetric: bool, more: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)

    groups = torch.randint(0, group_count, (2, inputs), generator=generator, dtype=torch.int32)
    scales = torch.rand((2, 3, group_count), generator=generator)
    zeros = integers(2, 3, group_count) if asymmetric else None
    down = QuantizedWeight("int4", integers(2, 3, inputs), scales, zeros)
    size = regrouped_size(groups, group_count) + 32 * more
    places = Regrouping.of(groups, group_count, size)
    held = places.columns_of(down)
    assert held.values.shape == (2, 3, size) and held.scales.shape == (2, 3, size // 32)
    found = dequantize(held)
    wide = groups.long().unsqueeze(1).expand(2, 3, inputs)
    offsets = 0.0 if zeros is None else zeros.float().gather(-1, wide)
    truth = (down.values.float() - offsets) * scales.gather(-1, wide)
    rows = places.rows_of(
        QuantizedWeight(
            "int4", integers(2, 2 * inputs, 64), torch.rand((2, 2 * inputs, 1)), bias=torch.rand(2, 2 * inputs)
        ),
        2,
    )
    assert rows.values.shape == (2, 2 * size, 64) and rows.scales.shape == (2, 2 * size, 2)
    for expert in range(2):
        at = places.inputs[expert]
        assert sorted(at[at >= 0].tolist()) == list(range(inputs))
        assert torch.equal(found[expert][:, at >= 0], truth[expert][:, at[at >= 0]])
        assert not bool(found[expert][:, at < 0].any())
        added = (at < 0).repeat(2)
        assert not bool(rows.values[expert][added].any()) and not bool(rows.bias[expert][added].any())


# ---- damage ----------------------------------------------------------------------------------------------------------


def damaged(layer: Layer, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Layer:
    tensors = load_file(layer.folder / "model.safetensors")
    change(tensors)
    write_folder(folder, tensors, None)
    (folder / "config.json").write_bytes((layer.folder / "config.json").read_bytes())
    return replace(layer, folder=folder)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (12, "has input 4 in group 12; 0 to 11 are accepted"),
        (-1, "has input 4 in group -1; 0 to 11 are accepted"),
        (None, "has 192 inputs in group 0; up to 32 are accepted"),
    ],
)
def test_groups_that_are_none_are_named(tmp_path: Path, value: int | None, said: str) -> None:
    name = f"{PREFIX}.1.down_proj.g_idx"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][slice(192, None) if value is None else 196] = 0 if value is None else value

    layer = damaged(written(tmp_path, "GPTQ"), tmp_path / "damaged", change)
    with pytest.raises(CheckpointError) as refused:
        layer.load(ExpertsPart(ALL, 2, 1))
    assert f"{name}[192:384] {said}" in str(refused.value)


def test_an_order_that_was_never_set_is_that_of_the_inputs(tmp_path: Path) -> None:
    """Tools fill an index with -1 before calibration, which whole layers and slices take for the inputs' own order."""

    def unset(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("g_idx"):
                tensor.fill_(-1)

    layer = damaged(written(tmp_path, "GPTQ"), tmp_path / "unset", unset)
    whole, _ = layer.load()
    inputs, total = routed(), torch.zeros(5, HIDDEN)
    for index in range(2):
        total += exact_sum(layer.load(ExpertsPart(ALL, 2, index))[0], inputs)
    assert_close(total, exact_sum(whole, inputs))


def test_a_missing_order_is_found_by_the_check(tmp_path: Path) -> None:
    name = f"{PREFIX}.1.down_proj.g_idx"
    layer = damaged(written(tmp_path, "GPTQ"), tmp_path / "damaged", lambda tensors: tensors.pop(name))
    with Checkpoint.open(layer.folder) as checkpoint:
        source, check = find_experts(checkpoint, layer.layout, None, ExpertsPart(ALL, 2, 1)), TensorCheck(checkpoint)
        assert source.config.activation.gated  # whoever asks before the check
        source.check(check)
        assert check.missing == [name]


def test_sizes_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    layer = written(tmp_path, "GPTQ, asymmetric")
    config = (layer.folder / "config.json").read_text().replace('"group_size": 64', '"group_size": 96')
    (layer.folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match="group_size=96 does not divide in_features=128"):
        layer.load(ExpertsPart(ALL, 2, 1))
