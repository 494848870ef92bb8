"""Copies of the small checkpoints in tests/data with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpumoe.layers.reference import dequantize
from cpumoe.layers.rounding import unpack_nibbles

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
NAMES = (
    "deepseekv3-w4a8-g32",
    "gptoss-w4a8-g32",
    "mixtral-w4a8-channel",
    "qwen3moe-w4a8-g32-packed",
    "qwen3moe-w8a8-int8",
)

Tensors = dict[str, Tensor]
Config = dict[str, Any]


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
            held[f"{module}.weight"] = dequantize(values, held.pop(scale)).to(torch.bfloat16)
        if regroup is not None:
            grouped = regroup(dict(held))
            held.clear()
            held.update(grouped)

    return changed_copy(folder, name, to_float, no_quantization)
