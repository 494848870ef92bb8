"""One layer of experts in every on-disk form that has a linear for each expert and projection, and reading parts of it.

Layouts are written down here and not described by transformers, so that a file takes some milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from float_checkpoints import KINDS, compressed, section_of
from safetensors.torch import save_file
from tiny_architectures import packed_words, quantization_section, stored_fp4, stored_integers
from torch import Tensor
from word_checkpoints import Rounded, awq_tensors, gptq_section, gptq_tensors, rounded

from cpumoe import Experts, Scheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats.fp8 import InverseFp8Storage
from cpumoe.checkpoints.formats.modelopt import ModeloptFp4Storage
from cpumoe.checkpoints.loading import find_experts, load_experts
from cpumoe.checkpoints.model_layout import ExpertsLayout, ExpertsShape
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.layers.activation import Activation
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import quantize_weight

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Store = Callable[[Tensor], Tensors]

PREFIX = "model.layers.0.mlp.experts"
COUNT, HIDDEN = 3, 128


@dataclass(frozen=True)
class Layer:
    """A checkpoint of one layer of experts, and where they are in it."""

    folder: Path
    layout: ExpertsLayout

    def load(self, part: ExpertsPart | None = None, scheme: str | None = None) -> tuple[Experts, int]:
        """The experts, or a part of them, after all checks; and how many bytes of tensors were read."""
        with Checkpoint.open(self.folder) as checkpoint:
            source = find_experts(checkpoint, self.layout, None if scheme is None else Scheme.parse(scheme), part)
            check = TensorCheck(checkpoint)
            source.check(check)
            check.nothing_else_but(())
            check.raise_problems()
            return load_experts(source), checkpoint.bytes_read


def per_expert_layout(
    inner: int, *, activation: str = "silu", has_bias: bool = False, count: int = COUNT, hidden: int = HIDDEN
) -> ExpertsLayout:
    kind = Activation(activation)
    names = ("gate_proj", "up_proj", "down_proj") if kind.gated else ("up_proj", "down_proj")
    linears = tuple(tuple(f"{PREFIX}.{expert}.{name}" for name in names) for expert in range(count))
    return ExpertsLayout(PREFIX, PREFIX, ExpertsShape(count, hidden, inner, kind, has_bias), linears)


def write_folder(folder: Path, tensors: Tensors, section: Config | None) -> None:
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "experts"} | ({} if section is None else {"quantization_config": section})
    (folder / "config.json").write_text(json.dumps(config))


def write_layer(folder: Path, section: Config | None, store: Store, layout: ExpertsLayout) -> Layer:
    """Random experts, each of whose linears ``store`` turns into tensors by suffix."""
    shape, tensors = layout.shape, {}
    for linears in layout.linears:
        for name in linears:
            rows, columns = shape.intermediate_size, shape.hidden_size
            if name == linears[-1]:
                rows, columns = columns, rows
            parts = store(torch.randn(rows, columns) / columns**0.5)
            if shape.has_bias:
                parts = parts | {"bias": torch.randn(rows)}
            tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    write_folder(folder, tensors, section)
    return Layer(folder, layout)


# ---- forms -----------------------------------------------------------------------------------------------------------


def _compressed(kind: str) -> tuple[Config, Store]:
    form, weights, activations = KINDS[kind]

    def store(weight: Tensor) -> Tensors:
        inputs = {}
        if activations is not None and activations["dynamic"] is False:
            inputs["input_scale"] = torch.tensor([0.05])
        if activations is not None and activations["dynamic"] == "local":
            inputs["input_global_scale"] = torch.tensor([20.0])
        return compressed(weight, form, weights)[0] | inputs

    return section_of(form, weights, activations, []), store


def _integers(scheme: str, form: str) -> tuple[Config, Store]:
    def store(weight: Tensor) -> Tensors:
        quantized = quantize_weight(weight, Scheme.parse(scheme))
        parts, _ = stored_fp4(quantized) if "fp4" in scheme else stored_integers(quantized, form)
        return {f"weight{suffix}": part for suffix, part in parts.items()}

    return quantization_section(scheme, form, []), store


def _words(
    bits: int, group_size: int, symmetric: bool, *, ordered: bool = False, seed: int = 0, **fields: Any
) -> tuple[Config, Store]:
    generator = np.random.default_rng(seed)

    def store(weight: Tensor) -> Tensors:
        stored = rounded(weight, bits, group_size, symmetric)
        if not ordered:
            return gptq_tensors(stored, bits)
        order = generator.permutation(weight.shape[1])
        tensors = gptq_tensors(Rounded(stored.codes[:, order], stored.zeros, stored.scales), bits)
        return tensors | {"g_idx": tensors["g_idx"][order]}

    return gptq_section(bits, group_size, symmetric, desc_act=True, static_groups=not ordered, **fields), store


def _awq(group_size: int, zero_point: bool) -> tuple[Config, Store]:
    section = {"bits": 4, "group_size": group_size, "quant_method": "awq", "version": "gemm", "zero_point": zero_point}
    return section, lambda weight: awq_tensors(rounded(weight, 4, group_size, not zero_point))


def _ordered_compressed(scheme: str) -> tuple[Config, Store]:
    section = quantization_section(scheme, "pack-quantized", [])
    section["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    generator = torch.Generator().manual_seed(4)

    def store(weight: Tensor) -> Tensors:
        quantized = quantize_weight(weight, Scheme.parse(scheme))
        parts, _ = stored_integers(quantized, "pack-quantized")
        order = torch.randperm(weight.shape[1], generator=generator)
        bits = 8 if quantized.element == "int8" else 4
        size = weight.shape[1] // quantized.scales.shape[1]
        groups = (torch.arange(weight.shape[1]) // size).to(torch.int32)[order]
        parts = parts | {"_packed": packed_words(quantized.values[:, order], bits), "_g_idx": groups}
        return {f"weight{suffix}": part for suffix, part in parts.items()}

    return section, store


def _fp8(kind: str) -> tuple[Config, Store]:
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    storage = InverseFp8Storage(Scheme.parse("fp8-block"), "fp8")
    if kind == "blocks":
        return blocks, lambda weight: storage.encode(quantize_weight(weight, storage.scheme))

    def per_tensor(weight: Tensor) -> Tensors:
        scale = weight.abs().max() / 448
        return {
            "weight": (weight / scale).to(torch.float8_e4m3fn),
            "weight_scale": scale,
            "input_scale": torch.tensor(0.03),
        }

    return {"quant_method": "fp8", "activation_scheme": "static"}, per_tensor


def _modelopt(weight: Tensor) -> Tensors:
    storage = ModeloptFp4Storage(Scheme.parse("nvfp4a16"), "modelopt")
    return storage.encode(quantize_weight(weight, storage.scheme)) | {"input_scale": torch.tensor(0.25)}


_AUTO_ROUND = {"bits": 4, "data_type": "int", "group_size": 64, "sym": True, "quant_method": "auto-round"}

#: Name -> ``quantization_config``, and what stores a weight.
FORMS: dict[str, tuple[Config | None, Store]] = {
    **{f"compressed-tensors {kind}": _compressed(kind) for kind in KINDS},
    "int-quantized w4a8-g32": _integers("w4a8-g32", "int-quantized"),
    "int-quantized w8a8": _integers("w8a8", "int-quantized"),
    **{f"pack-quantized {s}": _integers(s, "pack-quantized") for s in ("w4a8-g64", "w4a16-g32-asym", "w4a16-asym")},
    "mxfp4-pack-quantized": _integers("mxfp4a16", "mxfp4-pack-quantized"),
    "nvfp4-pack-quantized": _integers("nvfp4a16", "nvfp4-pack-quantized"),
    "GPTQ": _words(4, 64, True),
    "GPTQ, asymmetric": _words(4, 32, False),
    "GPTQ, 8 bits": _words(8, 32, True),
    "GPTQ, per channel": _words(4, -1, False),
    "AWQ": _awq(32, True),
    "AWQ, symmetric": _awq(64, False),
    "AWQ, per channel": _awq(-1, True),
    "AutoRound": (
        _AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"},
        lambda weight: gptq_tensors(rounded(weight, 4, 64, True), 4, "borrowed", has_g_idx=False),
    ),
    "fp8 in blocks": _fp8("blocks"),
    "fp8, one scale": _fp8("tensor"),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _modelopt),
    "float": (None, lambda weight: {"weight": weight.to(torch.bfloat16)}),
}

#: In activation order: name -> the same, and the size of groups.
ORDERED: dict[str, tuple[Config, Store, int]] = {
    "GPTQ": (*_words(4, 32, True, ordered=True, seed=1), 32),
    "GPTQ, asymmetric": (*_words(4, 64, False, ordered=True, seed=2), 64),
    "GPTQ, 8 bits": (*_words(8, 128, True, ordered=True, seed=3), 128),
    "pack-quantized": (*_ordered_compressed("w4a16-g64"), 64),
    "pack-quantized, asymmetric": (*_ordered_compressed("w8a16-g32-asym"), 32),
}


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of_slice(tensor: Tensor, axis: int, slices: int) -> int:
    """Bytes that are read of a slice along a dimension: those of the slice.

    Where they are runs of less than 32 bytes, what lies between the first and the last of them is read as well.
    """
    run = prod(tensor.shape[axis:]) * tensor.element_size() // slices
    runs = prod(tensor.shape[:axis])
    return (runs - 1) * run * slices + run if run < 32 and run * slices <= 1024 else runs * run


# ---- comparing -------------------------------------------------------------------------------------------------------


def same_bits(found: QuantizedExperts, expected: QuantizedExperts) -> None:
    """All that the weights consist of, to the bit."""
    for name in ("gate_up", "down"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        for part in ("values", "scales", "zero_points", "factors", "bias", "input_order", "input_scales"):
            one, other = getattr(mine, part), getattr(theirs, part)
            assert (one is None) == (other is None), (name, part)
            if one is None:
                continue
            assert one.dtype == other.dtype and one.shape == other.shape, (name, part, one.shape, other.shape)
            equal = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            assert equal, (name, part)


@contextmanager
def one_thread() -> Iterator[None]:
    """For layers this small, threads that wait for one another take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def routed(count: int = COUNT, hidden: int = HIDDEN, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that go to two experts each; ids in the layer."""
    weights, ids = torch.rand(tokens, count).topk(2)
    return torch.randn(tokens, hidden), ids, weights


def exact_sum(experts: Experts, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What weights alone give, in fp32: activations are not quantised, whose scales would depend on all of a row."""
    return experts.reference(*inputs, quantize_activations=False)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) <= 1e-6
