"""Checkpoints of small floats: linears as compressed-tensors' own compressors and other tools write them.

The package's reader is tested against these and not against its own writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import is_quantized
from torch import Tensor

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.experts import Experts
from cpumoe.layers.reference import dequantize

Tensors = dict[str, Tensor]
Config = dict[str, Any]

#: Sizes of a model whose inputs all divide into blocks; the key projection has half a block of rows.
SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP4, FP6 = FP8 | {"num_bits": 4}, FP8 | {"num_bits": 6}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
PER_TOKEN, STATIC = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}

TENSOR_DYNAMIC = {"strategy": "tensor", "dynamic": True}

#: name -> format, weights and input_activations as llm-compressor's recipes have them; the name is the scheme that they
#: are read as, or ``READ_AS`` has it.
KINDS: dict[str, tuple[str, Config, Config | None]] = {
    "fp8": ("float-quantized", FP8 | {"strategy": "channel"}, FP8 | PER_TOKEN),
    "fp8-static": ("float-quantized", FP8 | {"strategy": "channel"}, FP8 | STATIC),
    "fp8-tensor": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | STATIC),
    "fp8-tensor-dynamic": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | TENSOR_DYNAMIC),
    "fp8-tensor-token": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | PER_TOKEN),
    "fp8-block": (
        "float-quantized",
        FP8 | BLOCK,
        FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8a16": ("naive-quantized", FP8 | {"strategy": "channel"}, None),
    "fp8a16-tensor": ("naive-quantized", FP8 | {"strategy": "tensor"}, None),
    "fp8a16-block": ("naive-quantized", FP8 | BLOCK, None),
    "mxfp8": ("mxfp8-quantized", FP8 | MX, FP8 | MX | {"dynamic": True}),
    "mxfp8a16": ("mxfp8-quantized", FP8 | MX, None),
    "mxfp6-e2m3": ("mxfp6-pack-quantized", FP6 | MX, FP6 | MX | {"dynamic": True}),
    "mxfp6-e2m3a16": ("mxfp6-pack-quantized", FP6 | MX, None),
    "mxfp4": ("mxfp4-pack-quantized", FP4 | MX, FP4 | MX | {"dynamic": True}),
    "mxfp4a8": ("mxfp4-pack-quantized", FP4 | MX, FP8 | MX | {"dynamic": True}),
    "mxfp4afp8": ("mxfp4-pack-quantized", FP4 | MX, FP8 | PER_TOKEN),
    "nvfp4": ("nvfp4-pack-quantized", FP4 | NV, FP4 | NV | {"dynamic": "local"}),
    "w8a8-static": ("int-quantized", INT8 | {"strategy": "channel"}, INT8 | STATIC),
    "w8a8": ("naive-quantized", INT8 | {"strategy": "channel"}, INT8 | PER_TOKEN),
    "w8a16": ("naive-quantized", INT8 | {"strategy": "channel"}, None),
    "w8a16-asym": ("pack-quantized", INT8 | {"strategy": "channel", "symmetric": False}, None),
    "w8a16-g32-asym": ("naive-quantized", INT8 | {"strategy": "group", "group_size": 32, "symmetric": False}, None),
    "w4afp8-g128": (
        "pack-quantized",
        INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128},
        FP8 | PER_TOKEN,
    ),
    "w4afp8-g128, tensor": (
        "pack-quantized",
        INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128},
        FP8 | TENSOR_DYNAMIC,
    ),
    "w4afp8-g128-static": (
        "pack-quantized",
        INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128},
        FP8 | STATIC,
    ),
    "fp8, tensor": ("float-quantized", FP8 | {"strategy": "channel"}, FP8 | TENSOR_DYNAMIC),
    "mxfp4afp8, tensor": ("mxfp4-pack-quantized", FP4 | MX, FP8 | TENSOR_DYNAMIC),
    "mxfp4afp8-static": ("mxfp4-pack-quantized", FP4 | MX, FP8 | STATIC),
    "mxfp4a6-e2m3": ("mxfp4-pack-quantized", FP4 | MX, FP6 | MX | {"dynamic": True}),
    "mxfp6-e2m3afp8": ("mxfp6-pack-quantized", FP6 | MX, FP8 | PER_TOKEN),
    "mxfp6-e2m3afp8-static": ("mxfp6-pack-quantized", FP6 | MX, FP8 | STATIC),
    "w8a8, tensor": ("int-quantized", INT8 | {"strategy": "tensor"}, INT8 | TENSOR_DYNAMIC),
    "w8a8, tensor and token": ("pack-quantized", INT8 | {"strategy": "tensor"}, INT8 | PER_TOKEN),
    "w8a8-static, tensor": ("int-quantized", INT8 | {"strategy": "tensor"}, INT8 | STATIC),
    "w8a16, tensor": ("pack-quantized", INT8 | {"strategy": "tensor"}, None),
}

#: The schemes of kinds whose names are none: one dynamic scale for all tokens is computed as one per token.
READ_AS = {"fp8-tensor-dynamic": "fp8-tensor-token"} | {n: n.partition(",")[0] for n in KINDS if "," in n}


def scheme_of(kind: str) -> str:
    """The scheme that checkpoints of a kind are read as."""
    return READ_AS.get(kind, kind)


def compressed(weight: Tensor, form: str, weights: Config) -> tuple[Tensors, Tensor]:
    """A weight [rows, columns] as compressed-tensors stores it, and what it makes of that again, in fp32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = _extremes(weight, weights, torch.amin), _extremes(weight, weights, torch.amax)
    state = {"weight": weight}
    whole = None
    if weights["strategy"] == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    state["weight_scale"], zero = calculate_qparams(low, high, args, whole)
    if not weights["symmetric"]:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    return dict(stored), compressor.decompress(stored, scheme)["weight"].float()


def _extremes(weight: Tensor, weights: Config, of: Callable[..., Tensor]) -> Tensor:
    """The smallest or largest values of those that share a scale."""
    if weights["strategy"] == "tensor":
        return of(weight)
    if weights["strategy"] == "channel":
        return of(weight, -1, keepdim=True)
    if weights["strategy"] == "block":
        rows = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 128))
        return of(rows.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)), (1, 3))
    return of(weight.unflatten(-1, (-1, weights["group_size"])), -1)


def section_of(form: str, weights: Config, inputs: Config | None, ignore: list[str]) -> Config:
    group = {"format": form, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignore}


def write_checkpoint(
    source: Path, folder: Path, section: Config | None, store: Callable[[str, Tensor], tuple[Tensors, Tensor] | None]
) -> Tensors:
    """Writes the float checkpoint ``source`` with its linears as ``store(name, weight)`` has them; None leaves one.

    Returns what the linears stand for, by name.
    """
    config = json.loads((source / "config.json").read_text())
    held: Tensors = {}
    weights: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        stored = store(module, tensor) if is_quantized(name, tensor) else None
        if stored is None:
            held[name] = tensor
            continue
        held |= {f"{module}.{suffix}": part for suffix, part in stored[0].items()}
        weights[module] = stored[1]
    folder.mkdir(parents=True)
    save_tensors(folder, held)
    if section is not None:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def save_tensors(folder: Path, tensors: Tensors) -> None:
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def write_compressed(
    source: Path, folder: Path, scheme: str, inputs: Callable[[str], float] = lambda name: 0.05
) -> Tensors:
    """All linears in one of ``KINDS``; ``inputs`` gives the stored scale of a linear's inputs by its name."""
    form, weights, activations = KINDS[scheme]

    def store(name: str, tensor: Tensor) -> tuple[Tensors, Tensor]:
        stored, weight = compressed(tensor, form, weights)
        if activations is not None and activations["dynamic"] is False:
            stored["input_scale"] = torch.tensor([inputs(name)])
        if activations is not None and activations["dynamic"] == "local":
            stored["input_global_scale"] = torch.tensor([inputs(name)])
        return stored, weight

    names = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    return write_checkpoint(source, folder, section_of(form, weights, activations, [*names, "lm_head"]), store)


def checked(folder: Path) -> None:
    """All checks that a load makes before it reads weights."""
    with Checkpoint.open(folder) as checkpoint:
        layout, check = describe(checkpoint), TensorCheck(checkpoint)
        check_model(layout, experts_of(checkpoint, layout).values(), quantized_linears(checkpoint, layout), check)
        check.raise_problems()


def loaded(folder: Path, layer: int = 0) -> Experts:
    """The experts of one layer, on the backend that serves everything."""
    checked(folder)
    with Checkpoint.open(folder) as checkpoint:
        return load_experts(
            experts_of(checkpoint, describe(checkpoint))[f"model.layers.{layer}.mlp.experts"], backend="reference"
        )


def expert_weights(experts: Experts, layer: int = 0) -> Tensors:
    """What all linears of a layer's experts stand for, by their names in files."""
    weights = {}
    for expert in range(experts.config.local_experts):
        part = experts.quantized(expert, 1)[0]
        for projection, weight in zip(("gate", "up", "down"), (*part.gate_up.halves(), part.down), strict=True):
            weights[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"] = dequantize(weight)
    return weights
