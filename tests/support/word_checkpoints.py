"""Small GPTQ, AWQ and AutoRound checkpoints, made from float ones with nothing of the package.

Everything is spelled out with integers of Python and numpy, as the tools define it, so that the package's reader is not
tested against its own writer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import apart, is_quantized, respelled
from torch import Tensor

AWQ_ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@dataclass
class Rounded:
    """A weight [rows, columns] as unsigned integers, and zero points and scales [rows, groups]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray  # fp16

    def dequantized(self) -> Tensor:
        """fp32 [rows, columns]."""
        size = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (np.repeat(part, size, 1) for part in (self.zeros, self.scales.astype(np.float32)))
        return torch.from_numpy((self.codes - zeros).astype(np.float32) * scales)


def rounded(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Rounded:
    """Round to nearest; the range of a group, or its largest magnitude on both sides of the middle."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    grouped = weight.double().numpy().reshape(rows, columns // size, size)
    last = 2**bits - 1
    if symmetric:
        scales = np.abs(grouped).max(-1) / (last // 2)
        zeros = np.full(scales.shape, (last + 1) // 2, np.int64)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = (high - low) / last
        zeros = np.rint(-low / scales).astype(np.int64)
    scales = scales.astype(np.float16)
    codes = np.rint(grouped / scales[..., None].astype(np.float64)) + zeros[..., None]
    return Rounded(np.clip(codes, 0, last).astype(np.int64).reshape(rows, columns), zeros, scales)


def words(parts: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers [..., n * integers in a word] -> int32 words [..., n], the first in the lowest bits.

    A negative integer takes from those above it, as in a sum.
    """
    grouped = parts.astype(np.int64).reshape(*parts.shape[:-1], -1, 32 // bits)
    summed = sum(grouped[..., i] << (bits * i) for i in range(32 // bits))
    return (summed & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def gptq_tensors(weight: Rounded, bits: int, zero_points: str = "gptq", *, has_g_idx: bool = True) -> Tensors:
    """``zero_points``: "gptq" (less one; -1 is all ones), "gptq_v2" (as they are), "borrowed" (less one in words)."""
    columns = weight.codes.shape[1]
    zeros = weight.zeros.T
    if zero_points == "gptq":
        zeros = (zeros - 1) % 2**bits
    elif zero_points == "borrowed":
        zeros = zeros - 1
    groups = weight.scales.shape[1]
    tensors = {
        "qweight": words(weight.codes, bits).T,
        "qzeros": words(zeros, bits),
        "scales": weight.scales.T,
    }
    if has_g_idx:
        tensors["g_idx"] = (np.arange(columns) // (columns // groups)).astype(np.int32)
    return {suffix: torch.from_numpy(np.ascontiguousarray(array)) for suffix, array in tensors.items()}


def awq_tensors(weight: Rounded, bits: int = 4) -> Tensors:
    order = AWQ_ORDERS[bits]

    def in_order(parts: np.ndarray) -> np.ndarray:  # [n, rows] -> the rows of each word in its order
        return parts.reshape(len(parts), -1, len(order))[..., list(order)].reshape(parts.shape)

    tensors = {
        "qweight": words(in_order(weight.codes.T), bits),
        "qzeros": words(in_order(weight.zeros.T), bits),
        "scales": weight.scales.T,
    }
    return {suffix: torch.from_numpy(np.ascontiguousarray(array)) for suffix, array in tensors.items()}


@dataclass
class Written:
    """A checkpoint, and what its quantised linears stand for, by name."""

    folder: Path
    weights: Tensors

    def tensors(self) -> Tensors:
        return load_file(self.folder / "model.safetensors")

    def changed(
        self,
        folder: Path,
        tensors: Callable[[Tensors], object] | None = None,
        config: Callable[[Config], object] | None = None,
    ) -> Written:
        """A copy after the functions have changed its tensors and its ``quantization_config``."""
        held, settings = self.tensors(), json.loads((self.folder / "config.json").read_text())
        if tensors is not None:
            tensors(held)
        if config is not None:
            config(settings["quantization_config"])
        folder.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings))
        return Written(folder, self.weights)


def write_words(
    source: Path,
    folder: Path,
    section: Config,
    store: Callable[[str, Tensor], tuple[Rounded, Tensors] | None],
) -> Written:
    """Writes the float checkpoint ``source`` with its linears as ``store`` has them (None: left in float).

    ``section`` becomes the ``quantization_config``.
    """
    config = json.loads((source / "config.json").read_text())
    held, weights = {}, {}
    tensors = apart(load_file(source / "model.safetensors"), config["model_type"])
    if config["model_type"] == "mixtral":
        tensors = respelled(tensors, "w123")
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        stored = store(module, tensor) if is_quantized(name, tensor) else None
        if stored is None:
            held[name] = tensor
            continue
        weights[module] = stored[0].dequantized()
        held |= {f"{module}.{suffix}": part for suffix, part in stored[1].items()}
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return Written(folder, weights)


def gptq_section(bits: int, group_size: int, symmetric: bool, checkpoint_format: str = "gptq", **fields: Any) -> Config:
    return {
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.1,
        "desc_act": False,
        "static_groups": False,
        "sym": symmetric,
        "true_sequential": True,
        "checkpoint_format": checkpoint_format,
        "quant_method": "gptq",
        **fields,
    }


def write_gptq(
    source: Path,
    folder: Path,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    checkpoint_format: str = "gptq",
    *,
    has_g_idx: bool = True,
    **fields: Any,
) -> Written:
    def store(_: str, tensor: Tensor) -> tuple[Rounded, Tensors]:
        weight = rounded(tensor, bits, group_size, symmetric)
        return weight, gptq_tensors(weight, bits, checkpoint_format, has_g_idx=has_g_idx)

    return write_words(source, folder, gptq_section(bits, group_size, symmetric, checkpoint_format, **fields), store)


def write_awq(source: Path, folder: Path, group_size: int = 32, zero_point: bool = True, **fields: Any) -> Written:
    section = {
        "bits": 4,
        "group_size": group_size,
        "modules_to_not_convert": ["gate"],
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": zero_point,
        **fields,
    }

    def store(_: str, tensor: Tensor) -> tuple[Rounded, Tensors]:
        bits = int(section["bits"])
        weight = rounded(tensor, bits, group_size, not zero_point)
        return weight, awq_tensors(weight, bits)

    return write_words(source, folder, section, store)


def first_of(tensors: Tensors, pattern: str) -> str:
    """The first name that matches."""
    return next(name for name in sorted(tensors) if re.search(pattern, name))
