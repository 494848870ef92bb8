"""Each rank reads its own experts or slices: right to the bit, and no other bytes of the files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_checkpoints import (
    COUNT,
    FORMS,
    HIDDEN,
    PREFIX,
    Layer,
    assert_close,
    bytes_of_slice,
    exact_sum,
    one_thread,
    per_expert_layout,
    routed,
    same_bits,
    write_layer,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpumoe import CheckpointError, Scheme, UnsupportedScheme
from cpumoe.checkpoints import tensor_file
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import experts_of, find_experts
from cpumoe.checkpoints.model_layout import ExpertsLayout, ModelLayout
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.experts_parts import part_of_experts
from cpumoe.layers.parallel_layout import ExpertsPart, ParallelLayout
from cpumoe.layers.scheme import SCHEMES

INNER = 512
ALL = tuple(range(COUNT))

#: One number for all of a linear, or its size.
OF_A_LINEAR = {"input_scale", "input_global_scale", "weight_global_scale", "weight_scale_2", "weight_shape"}


class Layers:
    """A layer in each form, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, bool], Layer] = {}

    def __call__(self, form: str, has_bias: bool = False) -> Layer:
        if (form, has_bias) not in self._made:
            torch.manual_seed(3)
            layout = per_expert_layout(INNER, has_bias=has_bias)
            self._made[form, has_bias] = write_layer(self._folder / f"{form}{has_bias}", *FORMS[form], layout)
        return self._made[form, has_bias]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    return Layers(tmp_path_factory.mktemp("layers"))


# ---- whole experts ---------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_all_ranks_are_those_of_the_layer(layers: Layers, form: str) -> None:
    whole, all_bytes = layers(form).load()
    read = 0
    for rank in ParallelLayout(tp_size=2, expert_parallel=True).ranks():
        part = rank.part_of(COUNT, INNER)
        experts, count = layers(form).load(part)
        assert (experts.config.experts, experts.config.held_experts) == (COUNT, len(part.experts))
        assert experts.config.intermediate_size == INNER
        same_bits(experts.quantized(), part_of_experts(whole.quantized(), part, gated=True))
        assert all_bytes * len(part.experts) == count * COUNT  # all experts are of one size
        read += count
    assert read == all_bytes == tensor_bytes(layers(form), 1)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(["pack-quantized w4a16-g32-asym", "GPTQ", "fp8, one scale", "float"]),
    experts=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=COUNT).map(tuple),
    slices=st.sampled_from([1, 2]),
)
def test_experts_in_any_order_and_more_than_once(
    layers: Layers, form: str, experts: tuple[int, ...], slices: int
) -> None:
    part = ExpertsPart(experts, slices, slices - 1)
    whole, _ = layers(form).load()
    held, _ = layers(form).load(part)
    assert held.config.held_experts == (None if experts == ALL else len(experts))
    same_bits(held.quantized(), part_of_experts(whole.quantized(), part, gated=True))


# ---- slices ----------------------------------------------------------------------------------------------------------


def is_cut(name: str, tensor: Tensor, *, symmetric: bool) -> bool:
    """Whether ranks with slices read parts of a stored tensor: what every slice needs they read whole."""
    suffix = name.rpartition(".")[2]
    if suffix in OF_A_LINEAR or tensor.numel() == 1:
        return False
    if suffix == "g_idx" or (suffix == "qzeros" and symmetric):  # compared with what they must hold, and not decoded
        return False
    if "down_proj" not in name:
        return True
    # A scale for a row belongs to all of its inputs.
    return not (
        (suffix in ("scales", "qzeros") and tensor.shape[0] == 1)
        or (suffix in ("weight_scale", "weight_zero_point") and tensor.shape[1] == 1)
    )


def tensor_bytes(layer: Layer, slices: int) -> int:
    """Bytes that one of so many slices reads of a layer in a form of ``FORMS``."""
    tensors = load_file(layer.folder / "model.safetensors")
    section = FORMS[layer.folder.name.removesuffix("False").removesuffix("True")][0] or {}
    symmetric = bool(section.get("sym", not section.get("zero_point", True)))
    total = 0
    for name, tensor in tensors.items():
        size = prod(tensor.shape) * tensor.element_size()
        is_down, is_transposed = "down_proj" in name, name.endswith((".qweight", ".qzeros", ".scales"))
        cut = is_cut(name, tensor, symmetric=symmetric)
        total += bytes_of_slice(tensor, int(is_down != is_transposed), slices) if cut else size
        # Whether gate and up have one scale of the input is looked up before any expert is read.
        if "down_proj" not in name and name.endswith((".input_scale", ".input_global_scale")):
            total += size
    return total


@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_add_up_to_the_layer(layers: Layers, form: str, slices: int) -> None:
    whole, all_bytes = layers(form).load()
    inputs = routed()
    total = torch.zeros_like(inputs[0])
    for index in range(slices):
        part = ExpertsPart(ALL, slices, index)
        experts, count = layers(form).load(part)
        assert (experts.config.held_experts, experts.config.intermediate_size) == (None, INNER // slices)
        assert experts.config.scheme == whole.config.scheme
        same_bits(experts.quantized(), part_of_experts(whole.quantized(), part, gated=True))
        total += exact_sum(experts, inputs)
        assert count == tensor_bytes(layers(form), slices) < all_bytes * (1 / slices + 0.1)
    assert_close(total, exact_sum(whole, inputs))


@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
def test_slices_of_different_sizes_add_up_to_the_layer(tmp_path: Path, form: str) -> None:
    """Where units do not divide by the slices, the first have one more: 7 of 128, 14 of 64 or 28 of 32 in 3 slices."""
    torch.manual_seed(4)
    layer = write_layer(tmp_path / "layer", *FORMS[form], per_expert_layout(896))
    whole, all_bytes = layer.load()
    inputs, sizes, read = routed(), [], 0
    total = torch.zeros_like(inputs[0])
    for index in range(3):
        part = ExpertsPart(ALL, 3, index)
        experts, count = layer.load(part)
        same_bits(experts.quantized(), part_of_experts(whole.quantized(), part, gated=True))
        total += exact_sum(experts, inputs)
        sizes.append(experts.config.intermediate_size)
        read += count
    unit = whole.config.scheme.slice_unit
    assert sum(sizes) == 896 and max(sizes) - min(sizes) == unit and read < 1.3 * all_bytes
    assert_close(total, exact_sum(whole, inputs))


@pytest.mark.parametrize("form", ["int-quantized w4a8-g32", "AWQ", "float"])
def test_the_bias_of_down_is_added_once(layers: Layers, form: str) -> None:
    whole, all_bytes = layers(form, True).load()
    inputs = routed()
    total, read = torch.zeros_like(inputs[0]), []
    for index in range(2):
        part = ExpertsPart(ALL, 2, index)
        experts, count = layers(form, True).load(part)
        held = experts.quantized()
        same_bits(held, part_of_experts(whole.quantized(), part, gated=True))
        assert (held.down.bias is None) == (index > 0) and held.gate_up.bias is not None
        total += exact_sum(experts, inputs)
        read.append(count)
    assert_close(total, exact_sum(whole, inputs))
    assert sum(read) >= all_bytes and read[0] - read[1] == 4 * COUNT * HIDDEN


def test_slices_run_on_the_kernels(layers: Layers) -> None:
    """Sums in fp32, with activations as the kernels hold them: those of down depend on the slice."""
    whole, _ = layers("pack-quantized w4a8-g64").load()
    inputs = routed()
    parts = [layers("pack-quantized w4a8-g64").load(ExpertsPart(ALL, 2, index))[0] for index in range(2)]
    total = sum((experts(*inputs, fp32_out=True) for experts in parts), torch.zeros_like(inputs[0]))
    expected = whole(*inputs, fp32_out=True)
    assert float((total - expected).norm() / expected.norm()) < 0.02


# ---- float weights that are quantised as they are read ---------------------------------------------------------------


def _needs_no_text(scheme: str) -> bool:
    return not needs_input_scales(Scheme.parse(scheme))


@pytest.mark.every(4)
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if _needs_no_text(scheme)])
def test_slices_of_float_weights_are_quantised_as_the_whole(layers: Layers, scheme: str) -> None:
    whole, all_bytes = layers("float").load(scheme=scheme)
    form = Scheme.parse(scheme).weights
    has_factor = form.scale == "e4m3"
    rows_apart = form.scale == "none" or (form.group.rows is not None and not has_factor)
    columns_apart = form.scale == "none" or (form.group.columns is not None and not has_factor)
    matrix = COUNT * HIDDEN * INNER * 2  # bytes of gate, up or down
    for index in range(2):
        part = ExpertsPart(ALL, 2, index)
        experts, count = layers("float").load(part, scheme)
        same_bits(experts.quantized(), part_of_experts(whole.quantized(), part, gated=True))
        assert count == (1 if rows_apart else 2) * matrix + (matrix // 2 if columns_apart else matrix)
    assert all_bytes == 3 * matrix


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "inner", "slices", "said"),
    [
        (
            "compressed-tensors w4afp8-g128",
            384,
            4,
            "384 of the experts in 4 slices, which are multiples of 128; up to 3",
        ),
        ("fp8 in blocks", 256, 4, "256 of the experts in 4 slices, which are multiples of 128; up to 2 slices"),
        (
            "AWQ",
            96,
            4,
            "96 of the experts in 4 slices, which are multiples of 32; up to 3 slices, or expert parallelism",
        ),
        ("float", 64, 3, "the intermediate size 64 of the experts in 3 slices, which are multiples of 32; up to 2"),
    ],
)
def test_more_slices_than_units_are_refused_with_the_numbers(
    tmp_path: Path, form: str, inner: int, slices: int, said: str
) -> None:
    layer = write_layer(tmp_path / "layer", *FORMS[form], per_expert_layout(inner))
    with pytest.raises(UnsupportedScheme) as refused:
        layer.load(ExpertsPart(ALL, slices, 0))
    assert said in str(refused.value) and str(refused.value).startswith(PREFIX)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (ExpertsPart(()), f"this rank holds no experts of {PREFIX}; one or more of its 3 are accepted"),
        (ExpertsPart((0, 3)), f"expert 3 of {PREFIX}; 0 to 2 are accepted"),
        (ExpertsPart((-1,)), f"expert -1 of {PREFIX}; 0 to 2 are accepted"),
    ],
)
def test_parts_that_there_are_not(layers: Layers, part: ExpertsPart, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        layers("GPTQ").load(part)
    assert said in str(refused.value)


@pytest.mark.parametrize("part", [ExpertsPart((0,)), ExpertsPart(ALL, 2, 1)])
def test_what_another_rank_lacks_stops_every_rank_before_weights_are_read(
    layers: Layers, tmp_path: Path, part: ExpertsPart
) -> None:
    source = layers("GPTQ")
    tensors = load_file(source.folder / "model.safetensors")
    missing, short = f"{PREFIX}.2.up_proj.scales", f"{PREFIX}.2.down_proj.qweight"
    del tensors[missing]
    tensors[short] = tensors[short][:4].clone()
    (tmp_path / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        check = TensorCheck(checkpoint)
        find_experts(checkpoint, source.layout, None, part).check(check)
        assert check.missing == [missing]
        assert check.wrong == [f"{short} is I32 [4, {HIDDEN}], I32 [{INNER // 8}, {HIDDEN}] is accepted"]
        assert checkpoint.bytes_read == 0


def test_damage_in_a_slice_is_named_with_its_place(layers: Layers, tmp_path: Path) -> None:
    source = layers("int-quantized w4a8-g32")
    tensors, name = load_file(source.folder / "model.safetensors"), f"{PREFIX}.1.down_proj.weight_scale"
    tensors[name][5, 9] = torch.nan
    (tmp_path / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    damaged = Layer(tmp_path, source.layout)
    with pytest.raises(CheckpointError) as refused:
        damaged.load(ExpertsPart(ALL, 2, 1))
    assert f"{name}[:, 8:16] holds nan at [5, 1]; positive" in str(refused.value)
    damaged.load(ExpertsPart(ALL, 2, 0))  # which does not read it
    damaged.load(ExpertsPart((0, 2)))


# ---- all layers of a model -------------------------------------------------------------------------------------------


def test_all_layers_of_a_model_are_parted(layers: Layers) -> None:
    layer, asked = layers("AWQ"), []
    model = ModelLayout("experts", 1, HIDDEN, (layer.layout,), {}, {})

    def part_of(experts: ExpertsLayout) -> ExpertsPart:
        asked.append(experts)
        return ParallelLayout(tp_size=2).part_of(experts.shape.expert_count, experts.shape.intermediate_size)

    with Checkpoint.open(layer.folder) as checkpoint:
        (source,) = experts_of(checkpoint, model, part_of=part_of).values()
        assert source.part == ExpertsPart(ALL, 2, 0) and asked == [layer.layout]
        whole = source.stored_expert(1)[f"{PREFIX}.1.down_proj"]
        assert whole.values.shape == (HIDDEN, INNER)  # as the files have it, whatever the part


# ---- parts of tensors ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    exactly = data.draw(st.booleans())
    monkeypatch.setattr(tensor_file, "SHORT_RUN", 0 if exactly else 32)
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.float64, torch.float8_e4m3fn]))
    tensor = torch.arange(prod(shape)).to(torch.uint8).view(shape).to(dtype)
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True)]
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "part.safetensors")
    with TensorFile(tmp_path / "part.safetensors") as file:
        out = torch.empty(sizes, dtype=dtype)
        file.read_part("x", out, start)
        expected = tensor
        for axis, (first, size) in enumerate(zip(start, sizes, strict=True)):
            expected = expected.narrow(axis, first, size)
        assert torch.equal(out.float(), expected.float())
        wanted = out.numel() * out.element_size()
        assert wanted <= file.bytes_read <= (wanted if exactly else file.tensors["x"].bytes)


def test_a_part_may_go_into_a_view_with_strides(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(2, 4, 3)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        out = torch.zeros((2, 8, 3), dtype=torch.int32)
        file.read_part("x", out[:, 2:4], (0, 1, 0))
        assert torch.equal(out[:, 2:4], tensor[:, 1:3]) and int(out.abs().sum()) == int(tensor[:, 1:3].sum())
        for wrong, start in (
            (out[:, :2], (0, 3, 0)),
            (out[:, :2], (0, -1, 0)),
            (out[:, :2], (0, 0)),
            (out[:, :2].to(torch.int64), (0, 0, 0)),
        ):
            with pytest.raises(ValueError, match=r"x is I32 \[2, 4, 3\]; .* is no part of it"):
                file.read_part("x", wrong, start)
        with pytest.raises(ValueError, match="whole runs are accepted"):
            file.read_part("x", torch.zeros((2, 3, 4), dtype=torch.int32).transpose(1, 2), (0, 0, 0))


def test_a_file_that_ends_while_a_part_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros((64, 64))}, path)
    with TensorFile(path) as file:
        path.open("r+b").truncate(path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="ended while x was read; was it cut while being used"):
            file.read_part("x", torch.zeros((64, 32)), (0, 32))


def test_bytes_are_counted_whoever_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros((64, 64))}, path)
    with TensorFile(path) as file, ThreadPoolExecutor(8) as readers:
        list(readers.map(lambda _: file.read_part("x", torch.empty((64, 32)), (0, 32)), range(400)))
        assert file.bytes_read == 400 * 64 * 32 * 4
