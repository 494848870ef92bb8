"""Ranks that read parts of tensors which hold all experts of a layer, in every arrangement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_checkpoints import (
    HIDDEN,
    PREFIX,
    Layer,
    assert_close,
    bytes_of_slice,
    exact_sum,
    one_thread,
    routed,
    same_bits,
    write_folder,
)
from torch import Tensor

from cpumoe import UnsupportedScheme
from cpumoe.checkpoints.model_layout import ExpertsLayout, ExpertsShape, FusedExperts, FusedMatrix
from cpumoe.layers.activation import Activation
from cpumoe.layers.experts_parts import part_of_experts
from cpumoe.layers.parallel_layout import ExpertsPart

COUNT, INNER = 4, 128
ALL = tuple(range(COUNT))
LINEARS = tuple(tuple(f"{PREFIX}.{e}.{name}_proj" for name in ("gate", "up", "down")) for e in range(COUNT))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def matrix(name: str, tensors: int, has_bias: bool, *, transposed: bool, interleaved: bool, flat: bool) -> FusedMatrix:
    names = (f"{PREFIX}.{name}",) if tensors == 1 else tuple(f"{PREFIX}.{name}_{i}" for i in range(tensors))
    biases = tuple(f"{place}_bias" for place in names) if has_bias else ()
    return FusedMatrix(names, transposed, interleaved, flat, biases)


def stored(place: FusedMatrix, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """[experts, out, in] and [experts, out], gate rows before up rows, as the files have them."""
    tensors: dict[str, Tensor] = {}
    for names, whole in ((place.tensors, weight), (place.biases, bias)):
        if whole is None or not names:
            continue
        for name, part in zip(names, whole.chunk(len(names), 1), strict=True):
            if place.interleaved:
                part = torch.stack(part.chunk(2, 1), 2).flatten(1, 2)
            if place.transposed and part.dim() == 3:
                part = part.transpose(1, 2)
            tensors[name] = (part.flatten(0, 1) if place.flat else part).contiguous()
    return tensors


ARRANGEMENTS = [
    {"tensors": tensors, "transposed": transposed, "interleaved": interleaved, "flat": flat}
    for tensors, transposed, interleaved, flat in itertools.product((1, 2), *[(False, True)] * 3)
    if not (tensors == 2 and interleaved)
]


def write_fused(folder: Path, arrangement: dict[str, int], *, gated: bool = True, has_bias: bool = True) -> Layer:
    activation = Activation("silu" if gated else "relu2")
    rows = activation.gate_up_rows(INNER)
    arrangement = arrangement if gated else arrangement | {"tensors": 1, "interleaved": False}
    others = {**arrangement, "tensors": 1, "interleaved": False}
    gate_up, down = matrix("gate_up", has_bias=has_bias, **arrangement), matrix("down", has_bias=has_bias, **others)
    tensors: dict[str, Tensor] = {}
    for place, size, inputs in ((gate_up, rows, HIDDEN), (down, HIDDEN, INNER)):
        weight = (torch.randn(COUNT, size, inputs) / inputs**0.5).to(torch.bfloat16)
        tensors |= stored(place, weight, torch.randn(COUNT, size).to(torch.bfloat16) if has_bias else None)
    write_folder(folder, tensors, None)
    shape = ExpertsShape(COUNT, HIDDEN, INNER, activation, has_bias)
    linears = LINEARS if gated else tuple(names[1:] for names in LINEARS)
    return Layer(folder, ExpertsLayout(PREFIX, PREFIX, shape, linears, FusedExperts(gate_up, down)))


def name_of(arrangement: dict[str, int]) -> str:
    return " ".join(
        ["two" if arrangement["tensors"] == 2 else "one", *(k for k, v in arrangement.items() if v is True)]
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("scheme", [None, "w4a8-g32", "w8a8", "nvfp4a16", "fp8a16-tensor"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=name_of)
def test_parts_of_float_experts_in_every_arrangement(
    tmp_path: Path, arrangement: dict[str, int], scheme: str | None
) -> None:
    layer = write_fused(tmp_path / "layer", arrangement)
    whole, all_bytes = layer.load(scheme=scheme)
    expected = whole.quantized()
    read = 0
    for part in (ExpertsPart((0,)), ExpertsPart((3, 1, 2))):
        experts, count = layer.load(part, scheme)
        same_bits(experts.quantized(), part_of_experts(expected, part, gated=True))
        read += count
    assert read == all_bytes
    inputs, total, read = routed(COUNT), torch.zeros(5, HIDDEN), 0
    for index in range(2):
        part = ExpertsPart(ALL, 2, index)
        experts, count = layer.load(part, scheme)
        same_bits(experts.quantized(), part_of_experts(expected, part, gated=True))
        total += exact_sum(experts, inputs)
        read += count
    assert_close(total, exact_sum(whole, inputs))
    weights, biases = (
        2 * COUNT * HIDDEN * INNER,
        2 * 2 * COUNT * INNER,
    )  # bytes of gate, and of the biases of gate and up
    again = {None: 0, "w4a8-g32": 0, "w8a8": weights}.get(scheme, 3 * weights + biases)  # what both read
    assert read == all_bytes + again


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrangement=st.sampled_from(ARRANGEMENTS),
    gated=st.booleans(),
    has_bias=st.booleans(),
    scheme=st.sampled_from([None, "w4a8-g32", "w4a16-asym", "mxfp4a16", "fp8a16-tensor"]),
    experts=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=COUNT).map(tuple),
    slices=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_any_part(
    tmp_path_factory: pytest.TempPathFactory,
    arrangement: dict[str, int],
    gated: bool,
    has_bias: bool,
    scheme: str | None,
    experts: tuple[int, ...],
    slices: int,
    data: st.DataObject,
) -> None:
    part = ExpertsPart(experts, slices, data.draw(st.integers(0, slices - 1)))
    layer = write_fused(tmp_path_factory.mktemp("fused") / "m", arrangement, gated=gated, has_bias=has_bias)
    whole, _ = layer.load(scheme=scheme)
    held, _ = layer.load(part, scheme)
    same_bits(held.quantized(), part_of_experts(whole.quantized(), part, gated=gated))


# ---- gpt-oss as it is published --------------------------------------------------------------------------------------


def write_mxfp4(folder: Path) -> Layer:
    tensors: dict[str, Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        place = f"{PREFIX}.{name}"
        tensors[f"{place}_blocks"] = torch.randint(0, 256, (COUNT, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{place}_scales"] = torch.randint(120, 125, (COUNT, rows, columns // 32), dtype=torch.uint8)
        tensors[f"{place}_bias"] = torch.randn(COUNT, rows, dtype=torch.bfloat16)
    write_folder(folder, tensors, {"quant_method": "mxfp4"})
    shape = ExpertsShape(COUNT, HIDDEN, INNER, Activation("swiglu_oai"), has_bias=True)
    gate_up, down = (f"{PREFIX}.{name}" for name in ("gate_up_proj", "down_proj"))
    fused = FusedExperts(
        FusedMatrix((gate_up,), transposed=True, interleaved=True, biases=(f"{gate_up}_bias",)),
        FusedMatrix((down,), transposed=True, biases=(f"{down}_bias",)),
    )
    return Layer(folder, ExpertsLayout(PREFIX, PREFIX, shape, LINEARS, fused))


@pytest.mark.parametrize("slices", [2, 4])
def test_parts_of_blocks_of_mxfp4(tmp_path: Path, slices: int) -> None:
    layer = write_mxfp4(tmp_path / "layer")
    whole, all_bytes = layer.load()
    expected, read = whole.quantized(), 0
    for part in (ExpertsPart((0,)), ExpertsPart((3, 1, 2))):
        experts, count = layer.load(part)
        same_bits(experts.quantized(), part_of_experts(expected, part, gated=True))
        read += count
    assert read == all_bytes
    inputs, total, read = routed(COUNT), torch.zeros(5, HIDDEN), 0
    for index in range(slices):
        part = ExpertsPart(ALL, slices, index)
        experts, count = layer.load(part)
        same_bits(experts.quantized(), part_of_experts(expected, part, gated=True))
        total += exact_sum(experts, inputs)
        read += count
    of_down = [torch.empty((HIDDEN, INNER // 32, *block), dtype=torch.uint8) for block in ((16,), ())]
    between = COUNT * sum(slices * bytes_of_slice(tensor, 1, slices) - tensor.numel() for tensor in of_down)
    assert read == all_bytes + between  # and nothing twice: the first slice alone reads the biases of down
    assert_close(total, exact_sum(whole, inputs))


def test_slices_that_cut_through_blocks_are_refused(tmp_path: Path) -> None:
    layer = write_mxfp4(tmp_path / "layer")
    with pytest.raises(
        UnsupportedScheme, match="size 128 of the experts in 8 slices, which are multiples of 32; up to 4"
    ):
        layer.load(ExpertsPart(ALL, 8, 0))
