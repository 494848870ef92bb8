"""Linears whose tensors are handed over one by one, some of which are one in memory, or one in the files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from rank_checkpoints import FORMS, ORDERED, Store, one_thread
from torch import Tensor

from cpumoe import QuantizedLinear, Scheme
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.pushed_linear import LinearPart, PushedLinear
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError
from cpumoe.layers import reference
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight

_COLUMNS = 256
_QUANTIZED = {name: (section, store) for name, (section, store) in FORMS.items() if section is not None}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def _storage(section: dict[str, object], store: Store) -> LinearStorage:
    """How all linears are stored; not every configuration tells it without the names of tensors."""
    tensors = [f"model.layers.0.linear.{suffix}" for suffix in store(torch.randn(128, 128))]
    found = parse_quantization(section).with_tensors(tensors).storage_of("model.layers.0.linear")
    assert found is not None
    return found


def _linear(storage: LinearStorage, tensors: dict[str, Tensor], rows: int) -> QuantizedLinear:
    """Of one linear of the files, whole."""
    intake = PushedLinear("l", _COLUMNS, [LinearPart("l", storage, rows, 0, rows)])
    for suffix in storage.tensors(1, 1):
        intake.push((0,), suffix, tensors[suffix])
    (linear,) = intake.finish()
    return linear


def _weight(linear: QuantizedLinear) -> Tensor:
    """fp32 [out, in]: what the weights stand for, in the order of the inputs."""
    weight = unpack_weight(linear.weight_packed, scheme=linear.scheme)[0]
    return reference.dequantize(weight)


@pytest.mark.parametrize("form", [*_QUANTIZED, *(f"ordered {name}" for name in ORDERED)])
def test_every_form(form: str) -> None:
    """Query, key and value, of each of which half of the rows are held, in any order."""
    ordered = form.removeprefix("ordered ")
    section, store = ORDERED[ordered][:2] if form != ordered else _QUANTIZED[form]
    storage = _storage(section, store)
    rows = {"q": 512, "k": 256, "v": 256}
    stored = {name: store(torch.randn(count, _COLUMNS)) for name, count in rows.items()}
    parts = [LinearPart(name, storage, count, count // 2, count // 2) for name, count in rows.items()]
    intake = PushedLinear("qkv", _COLUMNS, parts)
    pushes = [((place,), suffix, stored[name][suffix]) for place, name in enumerate(rows) for suffix in intake.suffixes]
    random.Random(len(form)).shuffle(pushes)
    for push in pushes:
        intake.push(*push)
    linears = intake.finish()
    assert sum(linear.out_features for linear in linears) == 512
    alone = [_linear(storage, stored[name], count) for name, count in rows.items()]
    expected = torch.cat([_weight(one)[one.out_features // 2 :] for one in alone])
    torch.testing.assert_close(torch.cat(list(map(_weight, linears))), expected, rtol=0, atol=0)
    x = torch.randn(3, _COLUMNS)
    outputs = torch.cat([one(x)[:, one.out_features // 2 :] for one in alone], 1)
    torch.testing.assert_close(torch.cat([linear(x) for linear in linears], 1), outputs, rtol=1e-6, atol=1e-6)


def test_what_goes_together_is_one_matrix() -> None:
    for scheme, count in (("w4a8-g128", 1), ("fp8", 1), ("fp8-block", 1), ("w4a16-g32-asym", 1), ("nvfp4a16", 1)):
        assert len(_joined(scheme, [256, 128])) == count, scheme
    assert len(_joined("fp8-tensor-token", [256, 128])) == 1  # one scale each, which every row has in memory
    # Blocks of scales, of which the first linear has half a one at its end.
    assert len(_joined("fp8-block", [192, 128])) == 2


def _joined(scheme: str, rows: Sequence[int]) -> list[QuantizedLinear]:
    from cpumoe.layers.rounding import quantize_weight

    storage = storage_for(Scheme.parse(scheme))
    parts = [LinearPart(f"part {i}", storage, count, 0, count) for i, count in enumerate(rows)]
    intake = PushedLinear("both", _COLUMNS, parts)
    for place, count in enumerate(rows):
        for suffix, tensor in storage.encode(quantize_weight(torch.randn(count, _COLUMNS), storage.scheme)).items():
            intake.push((place,), suffix, tensor)
    return intake.finish()


def test_input_scales_that_differ() -> None:
    """Two linears with stored scales of their inputs are one matrix where these are the same."""
    section, store = _QUANTIZED["compressed-tensors fp8-static"]
    storage = _storage(section, store)
    for second, count in ((0.05, 1), (0.04, 2)):
        intake = PushedLinear("ab", _COLUMNS, [LinearPart(name, storage, 64, 0, 64) for name in "ab"])
        for place, scale in enumerate((0.05, second)):
            tensors = store(torch.randn(64, _COLUMNS)) | {"input_scale": torch.tensor([scale])}
            for suffix in intake.suffixes:
                intake.push((place,), suffix, tensors[suffix])
        assert len(intake.finish()) == count


def test_parts_that_are_one_in_the_files() -> None:
    section, store = _QUANTIZED["pack-quantized w4a8-g64"]
    storage = _storage(section, store)
    whole = store(torch.randn(192, _COLUMNS))
    whole["weight_shape"] = torch.tensor([192, _COLUMNS])
    parts = [LinearPart(n, storage, rows, rows // 2, rows // 2) for n, rows in (("q", 128), ("k", 32), ("v", 32))]
    expected = _weight(_linear(storage, whole, 192))
    held = torch.cat((expected[64:128], expected[144:160], expected[176:192]))
    intake = PushedLinear("qkv", _COLUMNS, parts)
    for suffix in intake.suffixes:
        intake.push((0, 1, 2), suffix, whole[suffix])
    (linear,) = intake.finish()
    torch.testing.assert_close(_weight(linear), held, rtol=0, atol=0)


def test_no_rows_are_held() -> None:
    section, store = _QUANTIZED["int-quantized w8a8"]
    storage = _storage(section, store)
    intake, tensors = (
        PushedLinear("o", _COLUMNS, [LinearPart("o", storage, 64, 64, 0)]),
        store(torch.randn(64, _COLUMNS)),
    )
    for suffix in intake.suffixes:
        intake.push((0,), suffix, tensors[suffix])
    assert intake.finish() == []


def test_what_is_wrong() -> None:
    section, store = _QUANTIZED["int-quantized w8a8"]
    storage, tensors = _storage(section, store), store(torch.randn(64, _COLUMNS))
    parts = [LinearPart(name, storage, 64, 0, 64) for name in ("q", "k")]

    def intake() -> PushedLinear:
        made = PushedLinear("qk", _COLUMNS, parts)
        made.push((0,), "weight", tensors["weight"])
        return made

    with pytest.raises(CheckpointError, match="^qk: tensors 3 missing: q.weight_scale, k.weight, k.weight_scale$"):
        intake().finish()
    with pytest.raises(CheckpointError, match="q.weight was loaded before"):
        intake().push((0,), "weight", tensors["weight"])
    with pytest.raises(CheckpointError, match="k has a tensor qweight; weight, weight_scale are accepted"):
        intake().push((1,), "qweight", tensors["weight"])
    wrong = intake()
    wrong.push((0,), "weight_scale", tensors["weight_scale"])
    wrong.push((1,), "weight_scale", tensors["weight_scale"])
    with pytest.raises(
        CheckpointError, match=r"qk: tensors 1 of another kind: k.weight is I8 \[32, 256\], I8 \[64, 256\] is"
    ):
        wrong.push((1,), "weight", tensors["weight"][:32])
    other = storage_for(Scheme.parse("w4a8-g32"))
    mixed = PushedLinear("qk", _COLUMNS, [parts[0], LinearPart("k", other, 64, 0, 64)])
    with pytest.raises(CheckpointError, match="qk is one linear, and config.json has several schemes"):
        mixed.push((0, 1), "weight", tensors["weight"])
    cut = PushedLinear("k", _COLUMNS, [LinearPart("k", storage_for(Scheme.parse("fp8-block")), 256, 64, 64)])
    fp8 = _QUANTIZED["compressed-tensors fp8-block"][1](torch.randn(256, _COLUMNS))
    cut.push((0,), "weight", fp8["weight"])
    with pytest.raises(CheckpointError, match="rows 64 to 127 of 256 with scales for blocks of 128"):
        cut.push((0,), "weight_scale", fp8["weight_scale"])


def test_several_linears_of_the_files_with_several_parts_each() -> None:
    """Four parts in memory, of which the files have three in one linear and the last alone."""
    storage, columns = storage_for(Scheme.parse("w4a8-g32")), 64
    first, second = (quantize_weight(torch.randn(rows, columns), storage.scheme) for rows in (96, 32))
    pushed = PushedLinear("in_proj_qkvz", columns, [LinearPart(f"[{n}]", storage, 32, 0, 32) for n in range(4)])
    for suffix, tensor in storage.encode(second).items():
        pushed.push((3,), suffix, tensor)
    for suffix, tensor in storage.encode(first).items():
        pushed.push((0, 1, 2), suffix, tensor)
    (linear,) = pushed.finish()
    both = QuantizedWeight.below_one_another([first, second])
    x = torch.randn(3, columns)
    torch.testing.assert_close(linear(x), QuantizedLinear.from_weight(both, storage.scheme)(x), rtol=0, atol=0)
