"""Experts whose tensors are handed over one by one: the same bits as from files, whatever the order."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_checkpoints import (
    COUNT,
    FORMS,
    HIDDEN,
    ORDERED,
    Layer,
    Store,
    one_thread,
    per_expert_layout,
    routed,
    same_bits,
    write_layer,
)
from safetensors.torch import load_file
from torch import Tensor

from cpumoe import Experts, Scheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats.mxfp4 import Mxfp4Storage
from cpumoe.checkpoints.model_layout import ExpertsShape
from cpumoe.checkpoints.pushed_experts import PushedLayer, PushedLinears, PushedStacks
from cpumoe.errors import CheckpointError
from cpumoe.layers.activation import Activation
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import quantize_weight

_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def _described(layer: Layer, part: ExpertsPart, scheme: str | None = None, backend: str | None = None) -> PushedLayer:
    with Checkpoint.open(layer.folder) as checkpoint:
        storage = checkpoint.storage_of(layer.layout.linears[0][0])
    return PushedLayer(
        "experts",
        layer.layout.shape,
        tuple(f"experts.{expert}" for expert in part.experts),
        storage,
        None if scheme is None else Scheme.parse(scheme),
        part.slices,
        part.slice,
        backend,
    )


def _tensors(layer: Layer, part: ExpertsPart) -> list[tuple[int, str, str, Tensor]]:
    """What is handed over for a part: the place of the expert, the projection, the suffix, and the tensor."""
    found = load_file(layer.folder / "model.safetensors")
    pushed = []
    for place, expert in enumerate(part.experts):
        for linear in layer.layout.linears[expert]:
            for name, tensor in found.items():
                module, _, suffix = name.rpartition(".")
                if module == linear:
                    pushed.append((place, _PROJECTIONS[linear.rpartition(".")[2]], suffix, tensor))
    return pushed


def _pushed(layer: Layer, part: ExpertsPart, seed: int, **options: str | None) -> Experts:
    intake, tensors = PushedLinears(_described(layer, part, **options)), _tensors(layer, part)
    random.Random(seed).shuffle(tensors)
    for tensor in tensors:
        intake.push(*tensor)
    return intake.finish()


_PARTS = {
    "whole": ExpertsPart.whole(COUNT),
    "some": ExpertsPart((2, 0)),
    "a slice": ExpertsPart(tuple(range(COUNT)), 2, 1),
}


def _written(folder: Path, form: str) -> Layer:
    section, store = FORMS[form]
    return write_layer(folder / "m", section, store, per_expert_layout(256))


@pytest.mark.every(5)
@pytest.mark.parametrize("part", _PARTS.values(), ids=_PARTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_any_order(form: str, part: ExpertsPart, tmp_path: Path) -> None:
    layer = _written(tmp_path, form)
    expected = layer.load(part)[0]
    found = _pushed(layer, part, seed=len(form))
    assert found.config == replace(expected.config, experts=COUNT)
    mine, theirs = found.quantized(), expected.quantized()
    if mine.gate_up.input_scales is not None:  # held for gate and for up, since another expert may have two
        assert theirs.gate_up.input_scales is not None
        scales = theirs.gate_up.input_scales.expand(-1, 2).contiguous()
        theirs = QuantizedExperts(replace(theirs.gate_up, input_scales=scales), theirs.down)
    same_bits(mine, theirs)


@pytest.mark.parametrize("part", _PARTS.values(), ids=_PARTS)
@pytest.mark.parametrize("form", ORDERED)
def test_activation_order(form: str, part: ExpertsPart, tmp_path: Path) -> None:
    section, store, _ = ORDERED[form]
    layer = write_layer(tmp_path / "m", section, store, per_expert_layout(256))
    same_bits(_pushed(layer, part, seed=1).quantized(), layer.load(part)[0].quantized())


@pytest.mark.parametrize("index", [0, 1])
def test_biases_are_on_one_slice(index: int, tmp_path: Path) -> None:
    section, store = FORMS["int-quantized w4a8-g32"]
    layer = write_layer(tmp_path / "m", section, store, per_expert_layout(128, has_bias=True))
    part = ExpertsPart(tuple(range(COUNT)), 2, index)
    found = _pushed(layer, part, seed=3).quantized()
    same_bits(found, layer.load(part)[0].quantized())
    assert (found.down.bias is not None) == (index == 0)


def test_no_gate(tmp_path: Path) -> None:
    section, store = FORMS["int-quantized w8a8"]
    layer = write_layer(tmp_path / "m", section, store, per_expert_layout(64, activation="relu2"))
    part = ExpertsPart.whole(COUNT)
    same_bits(_pushed(layer, part, seed=4).quantized(), layer.load(part)[0].quantized())


def test_float_weights_are_quantised(tmp_path: Path) -> None:
    layer, part = _written(tmp_path, "float"), ExpertsPart.whole(COUNT)
    found = _pushed(layer, part, seed=5, scheme="w4a8-g32")
    same_bits(found.quantized(), layer.load(part, "w4a8-g32")[0].quantized())


def test_other_backends(tmp_path: Path) -> None:
    layer, part = _written(tmp_path, "int-quantized w4a8-g32"), ExpertsPart.whole(COUNT)
    found, inputs = _pushed(layer, part, seed=6, backend="reference"), routed()
    assert found.backend.name == "reference"
    torch.testing.assert_close(found(*inputs), layer.load(part)[0](*inputs), rtol=1e-5, atol=1e-5)


def test_what_is_packed_is_let_go_of(tmp_path: Path) -> None:
    """However many experts there are: the tensors of eight complete ones, and of those that are not, are held."""
    section, store = FORMS["int-quantized w4a8-g32"]
    layer = write_layer(tmp_path / "m", section, store, per_expert_layout(64, count=40))
    part = ExpertsPart.whole(40)
    intake, tensors = PushedLinears(_described(layer, part)), _tensors(layer, part)
    of_expert, most = len(tensors) // 40, 0
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    for place, projection, suffix, tensor in tensors:
        copy = tensor.clone()
        alive.add(copy)
        intake.push(place, projection, suffix, copy)
        del copy
        most = max(most, len(alive))
    assert most <= 8 * of_expert
    intake.finish()
    assert len(alive) == 0


def _incomplete(layer: Layer, without: str) -> PushedLinears:
    part = ExpertsPart.whole(COUNT)
    intake = PushedLinears(_described(layer, part))
    for place, projection, suffix, tensor in _tensors(layer, part):
        if f"{place}.{projection}.{suffix}" != without:
            intake.push(place, projection, suffix, tensor)
    return intake


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    layer = _written(tmp_path, "int-quantized w4a8-g32")
    with pytest.raises(CheckpointError, match=r"^experts: tensors 1 missing: experts\.1\.up\.weight_scale$"):
        _incomplete(layer, "1.up.weight_scale").finish()
    with pytest.raises(CheckpointError, match="18 missing: experts.0.gate.weight, "):
        PushedLinears(_described(layer, ExpertsPart.whole(COUNT))).finish()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    layer = _written(tmp_path, "int-quantized w4a8-g32")
    weight = torch.zeros(256, HIDDEN, dtype=torch.int8)
    intake = _incomplete(layer, "2.down.weight")
    intake.push(2, "down", "weight", weight)
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down\.weight is I8 \[256, 128\], I8 \[128, 256\] is accepted"
    ):
        intake.finish()
    intake = _incomplete(layer, "2.down.weight")
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate has a tensor weight_packed; weight, weight_scale are"):
        intake.push(0, "gate", "weight_packed", weight)
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate\.weight was loaded before"):
        intake.push(2, "gate", "weight", weight)
    with pytest.raises(CheckpointError, match="torch.complex64, which is no dtype of checkpoints"):
        intake.push(2, "down", "weight", weight.to(torch.complex64))
    intake.push(2, "down", "bias", torch.zeros(HIDDEN))  # a bias of nothing, which tools write
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down\.bias has 1\.0 for output 0, and the model has no bias"
    ):
        intake.push(2, "down", "bias", torch.ones(HIDDEN))


def test_experts_of_different_kinds(tmp_path: Path) -> None:
    section, store = FORMS["int-quantized w4a8-g32"]
    layer = write_layer(tmp_path / "m", section, _with_scales_by_turns(store), per_expert_layout(64, count=20))
    with pytest.raises(CheckpointError, match="experts of one kind are accepted|of another kind"):
        _pushed(layer, ExpertsPart.whole(20), seed=0)


def _with_scales_by_turns(store: Store) -> Store:
    """Scales of one dtype for the linears of the first ten experts, and of another for the others."""
    count = iter(range(1000))

    def stored(weight: Tensor) -> dict[str, Tensor]:
        tensors, dtype = store(weight), torch.float16 if next(count) < 30 else torch.float32
        return tensors | {"weight_scale": tensors["weight_scale"].to(dtype)}

    return stored


# ---- all experts in one tensor ---------------------------------------------------------------------------------------


def _stacked(storage: Mxfp4Storage | None, experts: int, inner: int) -> tuple[PushedLayer, dict[str, Tensor], Experts]:
    activation = Activation("swiglu_oai")
    shape = ExpertsShape(experts, HIDDEN, inner, activation, has_bias=True)
    layer = PushedLayer("experts", shape, tuple(f"experts.{i}" for i in range(experts)), storage)
    gate_up, down = torch.randn(experts, 2 * inner, HIDDEN), torch.randn(experts, HIDDEN, inner)
    biases = torch.randn(experts, 2 * inner), torch.randn(experts, HIDDEN)
    tensors: dict[str, Tensor] = {}
    for name, weight, bias in zip(("gate_up", "down"), (gate_up, down), biases, strict=True):
        tensors[f"{name}_bias"] = bias
        if storage is None:
            tensors[name] = weight
            continue
        encoded = [storage.encode(quantize_weight(one, storage.scheme).plain()) for one in weight]
        tensors |= {f"{name}_{suffix}": torch.stack([e[suffix] for e in encoded]) for suffix in encoded[0]}
    scheme = Scheme.parse("fp32") if storage is None else storage.scheme
    options = {"gate_up_bias": biases[0], "down_bias": biases[1], "activation": activation, "interleaved": True}
    return layer, tensors, Experts.quantize(gate_up, down, scheme, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", [None, Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4")], ids=["float", "mxfp4"])
def test_stacks(storage: Mxfp4Storage | None) -> None:
    layer, tensors, expected = _stacked(storage, 5, 96)
    for seed in range(3):
        intake, names = PushedStacks(layer), list(tensors)
        random.Random(seed).shuffle(names)
        for name in names:
            intake.push(name, tensors[name])
        same_bits(intake.finish().quantized(), expected.quantized())


def test_stacks_that_are_cut_already() -> None:
    """A slice comes as such, and the layer takes its size from it."""
    storage = Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4")
    _, tensors, expected = _stacked(storage, 3, 64)
    layer = PushedLayer(
        "experts", ExpertsShape(3, HIDDEN, 192, Activation("swiglu_oai"), True), ("0", "1", "2"), storage
    )
    intake = PushedStacks(layer)
    for name, tensor in tensors.items():
        intake.push(name, tensor)
    assert intake.finish().config.intermediate_size == 64 == expected.config.intermediate_size


def test_stacks_that_are_wrong() -> None:
    layer, tensors, _ = _stacked(Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4"), 2, 64)
    intake = PushedStacks(layer)
    with pytest.raises(CheckpointError, match="experts has a tensor gate_up_weight; gate_up_blocks, gate_up_scales, "):
        intake.push("gate_up_weight", tensors["gate_up_blocks"])
    for name in list(tensors)[:-1]:
        intake.push(name, tensors[name])
    with pytest.raises(CheckpointError, match=f"1 missing: {list(tensors)[-1]}$"):
        intake.finish()
    with pytest.raises(CheckpointError, match="of another kind: down_scales is U8"):
        intake.push("down_scales", tensors["down_scales"][:1])
