"""Copies of the small checkpoints in tests/data with something changed, and what loading and inspecting say of them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cpumoe
from cpumoe import CheckpointError, UnsupportedScheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.nibbles import unpack_nibbles
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import dequantize

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
NAMES = (
    "deepseekv3-w4a8-g32",
    "gptoss-w4a8-g32",
    "mixtral-w4a8-channel",
    "qwen3moe-w4a8-g32-packed",
    "qwen3moe-w8a8-int8",
)

Tensors = dict[str, Tensor]
Config = dict[str, Any]

REFUSALS = (CheckpointError, UnsupportedScheme)

#: Ways to damage one tensor.
TENSOR_CHANGES: dict[str, Callable[[Tensors, str], object]] = {
    "missing": lambda held, name: held.pop(name),
    "renamed": lambda held, name: held.update({f"{name}_": held.pop(name)}),
    "renamed in front": lambda held, name: held.update({f"x.{name}": held.pop(name)}),
    "with escape sequences": lambda held, name: held.update({f"\x1b[31m{name}\n\u202e": held[name].clone()}),
    "in a layer of 5000 digits": lambda held, name: held.update({f"model.layers.{'9' * 5000}.x": held[name].clone()}),
    "of one row less": lambda held, name: held.update({name: held[name][1:].clone()}),
    "of one dimension more": lambda held, name: held.update({name: held[name][None].clone()}),
    "empty": lambda held, name: held.update({name: torch.empty(0, dtype=held[name].dtype)}),
    "integers": lambda held, name: held.update({name: torch.ones(held[name].shape, dtype=torch.int16)}),
    "of 64 bits": lambda held, name: held.update({name: torch.ones(held[name].shape, dtype=torch.float64)}),
    "of 8 bits": lambda held, name: held.update({name: held[name].float().to(torch.float8_e4m3fn)}),
    "in another layer": lambda held, name: held.update({f"model.layers.7{name[14:]}": held[name].clone()}),
    "not finite": lambda held, name: held.update({name: torch.full_like(held[name], torch.nan)}),
}


def changed_copy(
    folder: Path,
    name: str,
    tensors: Callable[[Tensors], object] | None = None,
    config: Callable[[Config], object] | None = None,
) -> Path:
    """Writes the checkpoint ``name`` to ``folder`` after the functions have changed its tensors and its config.json."""
    held = load_file(CHECKPOINTS / name / "model.safetensors")
    settings = json.loads((CHECKPOINTS / name / "config.json").read_text())
    for change, value in ((tensors, held), (config, settings)):
        if change is not None:
            change(value)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def float_copy(folder: Path, name: str, regroup: Callable[[Tensors], Tensors] | None = None) -> Path:
    """The checkpoint ``name`` in bf16: one linear per expert, or what ``regroup`` makes of these."""

    def no_quantization(config: Config) -> None:
        config.pop("quantization_config")

    def to_float(held: Tensors) -> None:
        for scale in [n for n in held if n.endswith(".weight_scale")]:
            module = scale.removesuffix(".weight_scale")
            if held.pop(f"{module}.weight_shape", None) is None:
                values = held[f"{module}.weight"]
            else:
                values = unpack_nibbles(held.pop(f"{module}.weight_packed").view(torch.uint8))
            element = "int8" if name == "qwen3moe-w8a8-int8" else "int4"
            weight = QuantizedWeight(element, values, held.pop(scale))
            held[f"{module}.weight"] = dequantize(weight).to(torch.bfloat16)
        if regroup is not None:
            grouped = regroup(dict(held))
            held.clear()
            held.update(grouped)

    return changed_copy(folder, name, to_float, no_quantization)


def load_model(folder: Path) -> torch.nn.Module:
    return cpumoe.load_model(folder, dtype=torch.float32)


def outcome(folder: Path) -> tuple[torch.nn.Module | None, str]:
    """The model, or None and what was said. Loading and inspect must agree, and raise no exceptions but our own."""
    try:
        model, said = load_model(folder), ""
    except REFUSALS as refusal:
        model, said = None, str(refusal)
        assert said.isprintable() and len(said) < 20_000
    try:
        with Checkpoint.open(folder) as checkpoint:
            facts = Survey(checkpoint, describe).to_json()
            json.dumps(facts)
        loads, problems = facts["loads"], facts["problems"]
    except REFUSALS as refusal:
        loads, problems = False, str(refusal)
    if model is None and "transformers cannot make a model" in said:
        return model, said  # only who builds the model can know
    assert loads == (model is not None), f"load_model: {said or 'loads'}\ninspect: {problems}"
    return model, said


def write_holes(path: Path, large: dict[str, tuple[str, tuple[int, ...], int]]) -> int:
    """Add or replace tensors (dtype, shape and bytes) of a file by zeros that take no place on disk.

    Return the bytes of all tensors.
    """
    with TensorFile(path) as file:
        kept = {name: (info, path.read_bytes()[info.start :][: info.bytes]) for name, info in file.tensors.items()}
    header, end, data = {}, 0, b""
    for name, (info, raw) in kept.items():
        if name not in large:
            header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": (end, end + info.bytes)}
            end, data = end + info.bytes, data + raw
    for name, (dtype, shape, size) in large.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    os.truncate(path, 8 + len(text) + end)
    return end
