"""What becomes of which tensor when a checkpoint is quantised: layer by layer, and what lies outside the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import FloatExpertSource
from cpumoe.checkpoints.formats.compressed_tensors import Format, IntegerStorage, write_config
from cpumoe.checkpoints.layer_names import layers_prefix
from cpumoe.checkpoints.loading import experts_of
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.errors import CheckpointError
from cpumoe.layers.rounding import scale_dtype_of
from cpumoe.layers.scheme import Scheme

_HEAD = "lm_head"  # in every architecture that is served


@dataclass
class Report:
    """What a run did: how many matrices were quantised, and which experts calibration did not reach."""

    matrices: int = 0
    calibrated: int = 0
    tokens: int = 0
    uncovered: dict[str, list[int]] = field(default_factory=dict)  # layer's experts -> numbers of the experts

    def to_json(self) -> dict[str, Any]:
        return {
            "matrices": self.matrices,
            "calibrated_matrices": self.calibrated,
            "calibration_tokens": self.tokens,
            "experts_with_too_few_tokens": self.uncovered,
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Report:
        return cls(
            told["matrices"],
            told["calibrated_matrices"],
            told["calibration_tokens"],
            told["experts_with_too_few_tokens"],
        )


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer: the linears that are quantised, the experts, and what is copied."""

    checkpoint: Checkpoint
    index: int
    prefix: str  # of its names on disk, such as "model.layers.3."
    linears: dict[str, tuple[int, int]]  # name -> rows and columns
    experts: FloatExpertSource | None
    copied: tuple[str, ...]
    linear_storage: IntegerStorage | None
    expert_storage: IntegerStorage

    @property
    def experts_count(self) -> int:
        return 0 if self.experts is None else self.experts.config.local_experts

    def stored(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor of this layer's file, in the order in which it is written."""
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (rows, columns) in self.linears.items():
            assert self.linear_storage is not None  # there are no linears without it
            scale = scale_dtype_of(DTYPES[self.checkpoint.info(f"{name}.weight").dtype])
            out |= _announced(self.linear_storage, name, rows, columns, scale)
            if f"{name}.bias" in self.checkpoint:
                out |= _announced_copy(self.checkpoint, f"{name}.bias")
        if self.experts is not None:
            config, bias = self.experts.config, self.experts.config.has_bias
            for expert in range(config.local_experts):
                gate, up, down = self.experts.linear_names(expert)
                for name, rows, columns in (
                    (gate, config.intermediate_size, config.hidden_size),
                    (up, config.intermediate_size, config.hidden_size),
                    (down, config.hidden_size, config.intermediate_size),
                ):
                    out |= _announced(self.expert_storage, name, rows, columns, config.scale_dtype)
                    if bias:
                        out[f"{name}.bias"] = (torch.float32, (rows,))
        for name in self.copied:
            out |= _announced_copy(self.checkpoint, name)
        return out

    def add_to(self, report: Report, told: dict[str, Any]) -> None:
        """Adds what quantising this layer found."""
        report.matrices += told["matrices"]
        report.calibrated += told["calibrated"]
        if told["uncovered"] and self.experts is not None:
            report.uncovered[self.experts.prefix] = told["uncovered"]


class QuantizationPlan:
    """The whole checkpoint, cut into what lies outside the decoder layers and the layers."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, linears: Scheme | None, format_name: Format) -> None:
        self.checkpoint = checkpoint
        self.expert_storage = IntegerStorage(scheme, format_name)
        self.linear_storage = None if linears is None else IntegerStorage(linears, format_name)
        architecture = checkpoint.architecture
        prefix = layers_prefix(checkpoint)
        sources = {source.prefix: source for source in experts_of(checkpoint, scheme).values()}
        count = int(checkpoint.text_config["num_hidden_layers"])
        by_layer: dict[int, list[str]] = {index: [] for index in range(count)}
        self.outside: list[str] = []
        for name in sorted(checkpoint.names):
            number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
            # Layers behind the last one (for predicting several tokens) are copied as they are.
            (by_layer[int(number)] if number.isdigit() and int(number) < count else self.outside).append(name)
        self.left_in_float: list[str] = [n.removesuffix(".weight") for n in self.outside if self._is_matrix(n)]
        self.left_in_float += self._tied_heads(prefix)
        self.layers: list[LayerPlan] = []
        for index, names in by_layer.items():
            layer_prefix = f"{prefix}{index}."
            if not names:
                raise CheckpointError(f"{checkpoint.folder}: there is no tensor of layer {index} ({layer_prefix}*)")
            source = next((s for p, s in sources.items() if p.startswith(layer_prefix)), None)
            rest = [n for n in names if source is None or not n.startswith(f"{source.prefix}.")]
            matrices = [n.removesuffix(".weight") for n in rest if self._is_matrix(n)]
            chosen: dict[str, tuple[int, int]] = {}
            for name in matrices:
                rows, columns = checkpoint.info(f"{name}.weight").shape
                if linears is None or name.endswith(architecture.unquantized) or not linears.fits(columns):
                    self.left_in_float.append(name)
                else:
                    chosen[name] = (rows, columns)
            done = {f"{name}.{part}" for name in chosen for part in ("weight", "bias")}
            self.layers.append(
                LayerPlan(
                    checkpoint,
                    index,
                    layer_prefix,
                    chosen,
                    cast("FloatExpertSource | None", source),
                    tuple(n for n in rest if n not in done),
                    self.linear_storage,
                    self.expert_storage,
                )
            )

    def _tied_heads(self, layers: str) -> list[str]:
        """Heads without a tensor of their own: they are linears all the same, and other readers must leave them alone.

        Where the language model is part of a larger one, with ``language_model.model.layers.`` in front of its layers,
        transformers calls the head of the whole ``lm_head`` or that of the part ``language_model.lm_head``.
        """
        wrapper = layers.removesuffix("model.layers.") if layers.endswith(".model.layers.") else ""
        heads = sorted({_HEAD, wrapper + _HEAD})
        return [] if any(f"{head}.weight" in self.checkpoint for head in heads) else heads

    def _is_matrix(self, name: str) -> bool:
        info = self.checkpoint.info(name)
        return name.endswith(".weight") and len(info.shape) == 2 and info.dtype in FLOAT_DTYPES

    def shard_name(self, index: int) -> str:
        return f"model-{index + 1:05}-of-{len(self.layers) + 1:05}.safetensors"

    def stored(self, names: list[str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name in names:
            out |= _announced_copy(self.checkpoint, name)
        return out

    def quantization_config(self) -> dict[str, Any]:
        if self.linear_storage is None or self.linear_storage == self.expert_storage:
            return write_config({"Linear": self.expert_storage}, self.left_in_float)
        storages = {"re:.*[.]experts[.]": self.expert_storage, "Linear": self.linear_storage}
        return write_config(storages, self.left_in_float)


def _announced(
    storage: LinearStorage, name: str, rows: int, columns: int, scale: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        f"{name}.{suffix}": (scale if suffix == storage.scale_suffix else DTYPES[stored.dtypes[0]], stored.shape)
        for suffix, stored in storage.tensors(rows, columns).items()
    }


def _announced_copy(checkpoint: Checkpoint, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    info = checkpoint.info(name)
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{name} is {info.dtype}; accepted are {', '.join(DTYPES)}")
    return {name: (DTYPES[info.dtype], info.shape)}
