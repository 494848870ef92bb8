"""Files of small floats in every format: right against the tools that define them, and refused if damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from float_checkpoints import (
    KINDS,
    SIZES,
    Tensors,
    expert_weights,
    loaded,
    save_tensors,
    scheme_of,
    write_compressed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_architectures import write_float
from torch import Tensor

from cpumoe import CheckpointError, Scheme, UnsupportedScheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import Buffers
from cpumoe.checkpoints.formats.compressed_storages import FORMATS, formats_of, storage_for, storage_in
from cpumoe.checkpoints.formats.fp8 import InverseFp8Storage
from cpumoe.checkpoints.formats.modelopt import ModeloptFp4Storage
from cpumoe.checkpoints.formats.quark import QuarkFp6Storage, QuarkRowFp8Storage
from cpumoe.checkpoints.formats.quark_integers import QuarkInt8Storage
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.model_tensors import quantized_linears
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import dequantize
from cpumoe.layers.scheme import INTEGERS, SCHEMES, WHOLE_FLOATS

UP = "model.layers.1.mlp.experts.3.up_proj"
LAYER = "model.layers.1.mlp.experts"
KEY = "model.layers.0.self_attn.k_proj"

#: The scheme in memory, where gate and up of one scale each become one matrix with a scale for each row.
HELD = {"fp8-tensor": "fp8-static", "fp8-tensor-token": "fp8", "fp8a16-tensor": "fp8a16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float") / "float", "qwen3_moe", **SIZES)


class Written:
    """A checkpoint of each kind, made when it is first asked for."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._weights: dict[str, Tensors] = {}

    def __call__(self, kind: str) -> tuple[Path, Tensors]:
        if kind not in self._weights:
            self._weights[kind] = write_compressed(self._source, self._folder / kind, kind)
        return self._folder / kind, self._weights[kind]

    def changed(self, kind: str, folder: Path, change: Callable[[Tensors], object]) -> Path:
        """A copy with other tensors."""
        tensors = load_file(self(kind)[0] / "model.safetensors")
        change(tensors)
        folder.mkdir()
        save_tensors(folder, tensors)
        (folder / "config.json").write_bytes((self(kind)[0] / "config.json").read_bytes())
        return folder


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(source, tmp_path_factory.mktemp("written"))


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


# ---- as compressed-tensors writes them -----------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_file(written: Written, kind: str) -> None:
    folder, truth = written(kind)
    experts = loaded(folder)
    assert str(experts.config.scheme) == HELD.get(scheme_of(kind), scheme_of(kind))
    for name, weight in expert_weights(experts).items():
        # compressed-tensors computes with bf16 where it multiplies nvfp4's two scales
        assert relative(weight, truth[name]) < (5e-3 if kind == "nvfp4" else 1e-6), name
    out = experts(torch.randn(5, 128), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5))
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_agrees_and_nothing_is_lost_in_writing(written: Written, kind: str) -> None:
    """What ``cpumoe check`` holds against the reader, and what ``save_pretrained`` writes."""
    with Checkpoint.open(written(kind)[0]) as checkpoint:
        for source in experts_of(checkpoint, describe(checkpoint)).values():
            part = source.read(0, 2, Buffers())[1].plain()
            stored = source.stored_expert(1)
            for (name, plain), held in zip(stored.items(), (*part.gate_up.halves(), part.down), strict=True):
                assert torch.equal(dequantize(plain), dequantize(held)), name
                if plain.input_scales is not None:
                    assert torch.equal(plain.input_scales, held.input_scales)
                for suffix, tensor in source.storage.encode(held).items():
                    assert _same(tensor, checkpoint.read(f"{name}.{suffix}"), suffix), f"{name}.{suffix}"
        linears = quantized_linears(checkpoint, describe(checkpoint))
        assert KEY in linears and (linears[KEY].rows, linears[KEY].columns) == (64, 128)
        storage, weight = linears[KEY].storage, linears[KEY].stored_weight()
        assert storage.format == KINDS[kind][0] and str(storage.scheme) == scheme_of(kind)
        for suffix, tensor in storage.encode(weight).items():
            assert _same(tensor, checkpoint.read(f"{KEY}.{suffix}"), suffix), suffix


def _same(tensor: Tensor, stored: Tensor, suffix: str) -> bool:
    if suffix == "weight_global_scale":  # held as its reciprocal
        return torch.allclose(tensor, stored, rtol=2e-7)
    return tensor.dtype == stored.dtype and torch.equal(_bytes(tensor), _bytes(stored))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_scalars_are_one_number_too(written: Written, tmp_path: Path) -> None:
    def flatten(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].reshape(())

    folder = written.changed("fp8-tensor", tmp_path / "scalars", flatten)
    for (name, weight), same in zip(
        expert_weights(loaded(folder)).items(), expert_weights(loaded(written("fp8-tensor")[0])).values(), strict=True
    ):
        assert torch.equal(weight, same), name


# ---- scales of gate and up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-static", "nvfp4", "w8a8-static"])
def test_input_scales_of_each_expert_are_kept(source: Path, tmp_path: Path, kind: str) -> None:
    def scale(name: str) -> float:
        expert = int(name.split(".")[5]) if "experts" in name else 0
        return 0.5 + expert / 8 + (0.25 if "down" in name else 0)

    write_compressed(source, tmp_path / "same", kind, scale)
    part = loaded(tmp_path / "same").quantized()
    numbers = torch.arange(part.count) / 8 + 0.5
    assert torch.equal(part.gate_up.input_scales, numbers.view(-1, 1))
    assert torch.equal(part.down.input_scales, numbers.view(-1, 1) + 0.25)
    write_compressed(source, tmp_path / "apart", kind, lambda name: scale(name) * (2 if "3.up_proj" in name else 1))
    held = loaded(tmp_path / "apart").quantized().gate_up.input_scales
    assert held.shape == (part.count, 2) and torch.equal(held[:, 0], numbers)
    assert torch.equal(held[:, 1], torch.where(torch.arange(part.count) == 3, 2 * numbers, numbers))


def test_global_scales_of_gate_and_up_are_kept_apart(written: Written, tmp_path: Path) -> None:
    gate = UP.replace("up_proj", "gate_proj")

    def halve(tensors: Tensors) -> None:
        tensors[f"{gate}.weight_global_scale"] = tensors[f"{UP}.weight_global_scale"] / 3

    folder = written.changed("nvfp4", tmp_path / "apart", halve)
    whole = load_file(folder / "model.safetensors")
    factors = loaded(folder, 1).quantized(3, 1).gate_up.factors[0]
    for name, rows in ((gate, slice(0, 128)), (UP, slice(128, None))):
        assert torch.equal(factors[rows], (1.0 / whole[f"{name}.weight_global_scale"]).expand(128))


@pytest.mark.parametrize("kind", ["fp8-tensor-dynamic", "w8a8, tensor"])
def test_gate_and_up_keep_a_scale_for_all_of_a_linear_each(written: Written, tmp_path: Path, kind: str) -> None:
    gate = UP.replace("up_proj", "gate_proj")

    def double(tensors: Tensors) -> None:
        tensors[f"{gate}.weight_scale"] = 2 * tensors[f"{UP}.weight_scale"]

    folder = written.changed(kind, tmp_path / "doubled", double)
    stored = load_file(folder / "model.safetensors")
    part = loaded(folder, 1).quantized(3, 1).plain().gate_up
    assert part.scales.shape == (1, 256, 1)
    for name, rows in ((gate, slice(0, 128)), (UP, slice(128, None))):
        assert torch.equal(part.scales[0, rows], stored[f"{name}.weight_scale"].view(1, 1).expand(128, 1))
        assert torch.equal(part.values[0, rows].view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))


# ---- damaged -------------------------------------------------------------------------------------------------------

ABSENT = object()


def _with(place: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8)[place] = int(value)
        else:
            tensor[place] = value
        return tensor

    return change


def _has_float_scales(kind: str) -> bool:
    return not KINDS[kind][1].get("scale_dtype")


DAMAGES: list[tuple[str, str, Callable[[Tensor], object], str]] = [
    *(
        (kind, "weight_scale", change, f"{UP}.weight_scale holds {said}")
        for kind in KINDS
        if _has_float_scales(kind)
        for change, said in (
            (lambda t: t * 0, "0"),
            (lambda t: -t, "-"),
            (lambda t: t * torch.nan, "nan"),
            (lambda t: t * torch.inf, "inf"),
        )
    ),
    ("fp8", "weight_scale", _with((5, 0), 0.0), f"{UP}.weight_scale holds 0 at [5, 0]; positive finite numbers are"),
    ("fp8-block", "weight_scale", _with((0, 0), -1.0), f"{UP}.weight_scale holds -1; positive finite"),
    *(
        (kind, "weight", _with((7, 9), code), f"{UP}.weight holds {code} at [7, 9]; every code but 127 and 255")
        for kind in ("fp8", "fp8-tensor", "fp8-block", "fp8a16", "mxfp8")
        for code in (0x7F, 0xFF)
    ),
    *(
        (kind, "weight_scale", _with((3, 2), 255), f"{UP}.weight_scale holds 255 at [3, 2]; the codes 0 to 254")
        for kind in ("mxfp8", "mxfp6-e2m3", "mxfp4", "mxfp4a8")
    ),
    *(
        ("nvfp4", "weight_scale", _with((3, 2), code), f"{UP}.weight_scale holds {code} at [3, 2]; the codes 0 to 126")
        for code in (0x7F, 0x80, 0xFF)
    ),
    *(
        (kind, suffix, lambda t, x=bad: torch.full_like(t, x), f"{UP}.{suffix} holds")
        for kind, suffix in (
            ("nvfp4", "weight_global_scale"),
            ("nvfp4", "input_global_scale"),
            ("fp8-tensor", "input_scale"),
            ("fp8-static", "input_scale"),
            ("w8a8-static", "input_scale"),
        )
        for bad in (0.0, -1.0, torch.nan, torch.inf)
    ),
    *(
        (kind, suffix, change, f"{UP}.{suffix}")
        for kind, suffix in (
            ("fp8", "weight"),
            ("fp8", "weight_scale"),
            ("fp8-tensor", "weight_scale"),
            ("fp8-tensor", "input_scale"),
            ("fp8-block", "weight_scale"),
            ("mxfp8", "weight"),
            ("mxfp8", "weight_scale"),
            ("mxfp6-e2m3", "weight_packed"),
            ("mxfp6-e2m3", "weight_scale"),
            ("mxfp4", "weight_packed"),
            ("nvfp4", "weight_global_scale"),
            ("nvfp4", "input_global_scale"),
            ("w8a8-static", "input_scale"),
            ("w8a16-asym", "weight_zero_point"),
            ("w8a16-g32-asym", "weight_zero_point"),
        )
        for change in (
            lambda t: ABSENT,
            lambda t: torch.cat((t, t)),
            lambda t: t[:0],
            lambda t: t.unsqueeze(0),
            lambda t: t.view(torch.uint8).to(torch.int64),
        )
    ),
    ("fp8", "input_scale", lambda t: torch.ones(1), f"unexpected: {UP}.input_scale"),
    ("fp8-block", "weight_zero_point", lambda t: torch.ones(1), f"unexpected: {UP}.weight_zero_point"),
    ("mxfp8", "weight_global_scale", lambda t: torch.ones(1), f"unexpected: {UP}.weight_global_scale"),
    ("w8a8", "input_scale", lambda t: torch.ones(1), f"unexpected: {UP}.input_scale"),
]


@pytest.mark.parametrize(("kind", "suffix", "change", "said"), DAMAGES)
def test_damaged_files_are_refused_by_name(
    written: Written, tmp_path: Path, kind: str, suffix: str, change: Callable[[Tensor], object], said: str
) -> None:
    def damage(tensors: Tensors) -> None:
        value = change(tensors.pop(f"{UP}.{suffix}", torch.ones(1)).clone())
        if isinstance(value, Tensor):
            tensors[f"{UP}.{suffix}"] = value

    folder = written.changed(kind, tmp_path / "damaged", damage)
    with pytest.raises(CheckpointError) as refusal:
        loaded(folder, 1)
    assert said in str(refusal.value)


def test_a_size_that_does_not_divide_into_blocks_is_refused_with_the_numbers(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "qwen3_moe", **SIZES | {"moe_intermediate_size": 64})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"{n[:-6]}weight_scale_inv": torch.ones(1, 1) for n in list(tensors) if "experts" in n}
    save_tensors(source, tensors)
    with pytest.raises(UnsupportedScheme, match="group_size=128 does not divide in_features=64"):
        loaded(source)


# ---- storages, whatever they hold ----------------------------------------------------------------------------------


def _storages() -> list[LinearStorage]:
    found: list[LinearStorage] = []
    for name in SCHEMES:
        scheme = Scheme.parse(name)
        if scheme.requested is None:
            found += [storage_in(scheme, form) for form in formats_of(scheme)]
    inverse = [InverseFp8Storage(Scheme.parse(n), "fp8") for n in ("fp8-block", "fp8-tensor", "fp8-tensor-token")]
    mx = ("mxfp6-e3m2", "mxfp6-e3m2afp8-static")
    quark: list[LinearStorage] = [
        QuarkRowFp8Storage(Scheme.parse("fp8"), "quark"),
        *(QuarkFp6Storage(Scheme.parse(n), "quark") for n in mx),
    ]
    quark += [QuarkInt8Storage(Scheme.parse(name), "quark") for name in ("w8a8", "w8a8-static", "w8a16")]
    return [*found, *inverse, *quark, *(ModeloptFp4Storage(Scheme.parse(n), "modelopt") for n in ("nvfp4", "nvfp4a16"))]


def test_every_scheme_but_floats_and_one_has_a_format() -> None:
    without = {name for name in SCHEMES if not formats_of(Scheme.parse(name))}
    assert without == {name for name in SCHEMES if "e3m2" in name} | {*WHOLE_FLOATS}
    with pytest.raises(UnsupportedScheme, match="compressed-tensors has no format for fp6-e3m2 weights"):
        storage_for(Scheme.parse("mxfp6-e3m2"))
    with pytest.raises(UnsupportedScheme, match="compressed-tensors has no format for fp6-e3m2 activations"):
        storage_for(Scheme.parse("mxfp4a6-e3m2"))
    assert {form for name in SCHEMES for form in formats_of(Scheme.parse(name))} == set(FORMATS)


def _random_weight(storage: LinearStorage, rows: int, columns: int, seed: int) -> QuantizedWeight:
    """Any numbers that such a linear may hold."""
    generator = torch.Generator().manual_seed(seed)
    form = storage.scheme.weights
    shape = form.scale_shape(rows, columns)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator)

    values = integers(0, 2**form.bits - 1, rows, columns)
    zeros = None
    if form.element in INTEGERS:
        values = (values - 2 ** (form.bits - 1)).to(torch.int8)
        if not form.symmetric:
            zeros = integers(-(2 ** (form.bits - 1)), form.largest, *shape).to(torch.int8)
    elif form.element == "fp8":
        values = values.to(torch.uint8)
        values[(values & 0x7F) == 0x7F] = 0
        values = values.view(torch.float8_e4m3fn)
    scales = {
        "e8m0": integers(0, 254, *shape).to(torch.uint8),
        "e4m3": integers(0, 126, *shape).to(torch.uint8).view(torch.float8_e4m3fn),
        "float": torch.rand(shape, generator=generator) + 0.1,
    }[form.scale]
    power = 2.0 ** int(integers(-3, 3, 1))  # whose reciprocal is exact
    return QuantizedWeight(
        form.element,
        values if form.element in INTEGERS or form.element == "fp8" else values.to(torch.int8),
        scales,
        zeros,
        factors=torch.full((rows,), power) if form.scale == "e4m3" else None,
        input_scales=None if storage.input_scale_suffix is None else torch.tensor([2 * power]),
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("storage", _storages(), ids=lambda s: f"{s.scheme}-{s.format}")
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), groups=st.integers(1, 3))
def test_what_is_written_is_read_twice_the_same(storage: LinearStorage, seed: int, rows: int, groups: int) -> None:
    columns = groups * (storage.scheme.group_size or 32)
    weight = _random_weight(storage, rows, columns, seed)
    tensors = storage.encode(weight)
    expected = storage.tensors(rows, columns)
    assert tensors.keys() == expected.keys()
    for suffix, stored in expected.items():
        assert stored.accepts(tuple(tensors[suffix].shape)), suffix
        if stored.contents is not None:
            stored.contents(suffix, tensors[suffix])
    plain = storage.decode_plainly(tensors)
    by_rows = {s: t if expected[s].by_rows else t.unsqueeze(0) for s, t in tensors.items() if not expected[s].is_known}
    fast = storage.decode(by_rows, rows, columns).plain()
    for name in ("values", "scales", "zero_points", "factors", "input_scales"):
        mine = [getattr(one, name) for one in (weight, plain, fast)]
        if mine[0] is None:
            assert mine[1] is None and mine[2] is None, name
            continue
        assert torch.equal(_bytes(mine[0]), _bytes(mine[1])) and mine[0].shape == mine[1].shape, name
        assert torch.equal(_bytes(mine[0]), _bytes(mine[2])), name


def test_experts_are_read_some_at_a_time_and_all_the_same(written: Written) -> None:
    with Checkpoint.open(written("nvfp4")[0]) as checkpoint:
        source = experts_of(checkpoint, describe(checkpoint))["model.layers.0.mlp.experts"]
        whole = load_experts(source, backend="reference").quantized()
        for first in range(whole.count):
            part = source.read(first, 1, Buffers()).plain()
            assert torch.equal(dequantize(part.gate_up[0]), dequantize(whole.gate_up[first]))
            assert torch.equal(part.gate_up.input_scales, whole.gate_up.input_scales[first : first + 1])
