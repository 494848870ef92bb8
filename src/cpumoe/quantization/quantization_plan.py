"""What happens to each tensor when a checkpoint is quantised: in the decoder layers, and outside of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint
from cpumoe.checkpoints.expert_sources import ExpertSource, FloatExpertSource
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.formats.compressed_tensors import write_config
from cpumoe.checkpoints.layer_names import layers_prefix
from cpumoe.checkpoints.loading import experts_of
from cpumoe.checkpoints.model_layout import ModelLayout
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.rounding import scale_dtype_of
from cpumoe.layers.scheme import Scheme

_HEAD = "lm_head"  # the name in every architecture that is supported


@dataclass
class QuantizationReport:
    """What a run did: how many matrices were quantised, and which experts calibration did not reach."""

    matrices: int = 0
    calibrated: int = 0
    tokens: int = 0
    uncovered: dict[str, list[int]] = field(default_factory=dict)  # prefix of a layer's experts -> their numbers

    def to_json(self) -> dict[str, Any]:
        return {
            "matrices": self.matrices,
            "calibrated_matrices": self.calibrated,
            "calibration_tokens": self.tokens,
            "experts_with_too_few_tokens": self.uncovered,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> QuantizationReport:
        return cls(
            content["matrices"],
            content["calibrated_matrices"],
            content["calibration_tokens"],
            content["experts_with_too_few_tokens"],
        )


@dataclass(frozen=True)
class PlannedLayer:
    """One decoder layer: which linears are quantised, where its experts come from, and which tensors are copied."""

    checkpoint: Checkpoint
    index: int
    prefix: str  # of its names on disk, such as "model.layers.3."
    linears: dict[str, tuple[int, int]]  # name -> rows and columns
    experts: tuple[FloatExpertSource, ...]  # one, none, or several groups
    copied: tuple[str, ...]
    linear_storage: LinearStorage | None
    expert_storage: LinearStorage

    def stored(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor in this layer's file, in the order in which they are written."""
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (rows, columns) in self.linears.items():
            assert self.linear_storage is not None  # there are no linears without it
            scale = scale_dtype_of(DTYPES[self.checkpoint.info(f"{name}.weight").dtype])
            out |= _announced(self.linear_storage, name, rows, columns, scale)
            if f"{name}.bias" in self.checkpoint:
                out |= _announced_copy(self.checkpoint, f"{name}.bias")
        for source in self.experts:
            config = source.config
            for expert in range(config.local_experts):
                *first, down = source.linear_names(expert)
                sizes = [(name, config.intermediate_size, config.hidden_size) for name in first]
                for name, rows, columns in (*sizes, (down, config.hidden_size, config.intermediate_size)):
                    out |= _announced(self.expert_storage, name, rows, columns, config.scale_dtype)
                    if config.has_bias:
                        out[f"{name}.bias"] = (torch.float32, (rows,))
        for name in self.copied:
            out |= _announced_copy(self.checkpoint, name)
        return out

    def add_to(self, report: QuantizationReport, counts: dict[str, Any]) -> None:
        """Adds what was counted while this layer was quantised."""
        report.matrices += counts["matrices"]
        report.calibrated += counts["calibrated"]
        report.uncovered |= counts["uncovered"]


class QuantizationPlan:
    """The whole checkpoint, divided into its decoder layers and the tensors outside of them."""

    def __init__(
        self, checkpoint: Checkpoint, layout: ModelLayout, scheme: Scheme, linears: Scheme | None, format_name: str
    ) -> None:
        self.checkpoint = checkpoint
        self.layout = layout
        self.expert_storage = storage_for(scheme, format_name)
        self.linear_storage = None if linears is None else storage_for(linears, format_name)
        sources = experts_of(checkpoint, layout, scheme)
        _refuse_tied_experts(sources)
        stacks = self._stacks()
        by_layer: dict[str, list[str]] = {f"{prefix}{n}.": [] for prefix, count in stacks.items() for n in range(count)}
        self.outside: list[str] = []
        for name in sorted(checkpoint.names):
            match = LAYER.match(name)
            # Layers after the last one, which predict further tokens, are copied as they are.
            by_layer.get("" if match is None else match[0], self.outside).append(name)
        self._experts = list(sources.values())
        self.left_in_float: list[str] = [n.removesuffix(".weight") for n in self.outside if self._is_matrix(n)]
        self.left_in_float += self._tied_heads(next(iter(stacks)))
        self.layers: list[PlannedLayer] = []
        for layer_prefix, names in by_layer.items():
            if not names:
                raise CheckpointError(f"{checkpoint.folder}: there is no tensor of the layer {layer_prefix}*")
            experts = [source for source in self._experts if source.prefix.startswith(layer_prefix)]
            modules = {source.layout.module for source in experts}
            read = {name for name in names if layout.of_experts.get(name) in modules}
            chosen: dict[str, tuple[int, int]] = {}
            for name in (n.removesuffix(".weight") for n in names if n not in read and self._is_matrix(n)):
                linear = layout.linears.get(name)
                if linears is None or linear is None or not linear.may_be_packed or not linears.fits(linear.columns):
                    self.left_in_float.append(name)
                else:
                    chosen[name] = (linear.rows, linear.columns)
            done = read | {f"{name}.{part}" for name in chosen for part in ("weight", "bias")}
            self.layers.append(
                PlannedLayer(
                    checkpoint,
                    len(self.layers),
                    layer_prefix,
                    chosen,
                    cast("tuple[FloatExpertSource, ...]", tuple(experts)),
                    tuple(n for n in names if n not in done),
                    self.linear_storage,
                    self.expert_storage,
                )
            )
        planned = {source.layout.module for layer in self.layers for source in layer.experts}
        if lost := [module for module in sources if module not in planned]:
            raise UnsupportedScheme(
                f"{lost[0]} is in no decoder layer that could be quantised; load_model(path, scheme=...) quantises it "
                "while it is read"
            )

    def _stacks(self) -> dict[str, int]:
        """What the names of decoder layers start with in the files, and how many layers each stack has."""
        matches = [LAYER.match(experts.prefix) for experts in self.layout.experts]
        prefixes = dict.fromkeys(match[1] for match in matches if match is not None)
        if not self.layout.experts:
            prefixes[layers_prefix(self.checkpoint)] = None
        found = [LAYER.match(name) for name in (*self.layout.linears, *self.layout.tensors)]
        counts = {p: [int(m[2]) for m in found if m is not None and m[1] == p] for p in prefixes}
        if not counts or not all(counts.values()):
            raise CheckpointError(f"{self.checkpoint.folder}: no tensor belongs to a decoder layer (model.layers.N.)")
        return {prefix: 1 + max(numbers) for prefix, numbers in counts.items()}

    @property
    def is_one_stack(self) -> bool:
        """Whether the layers follow one another, as a run through the model needs it."""
        return len(self._stacks()) == 1

    def _tied_heads(self, layers: str) -> list[str]:
        """Names of heads that have no tensor of their own. Other readers must be told not to quantise them either.

        If the language model is part of a larger model, so that its layers are ``language_model.model.layers.``,
        transformers calls the head either ``lm_head`` or ``language_model.lm_head``.
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
        targets = {"re:.*[.]experts[.]"}
        if not all(source.prefix.endswith(".experts") for source in self._experts):
            targets = {f"re:^{source.prefix.replace('.', '[.]')}[.][0-9]+[.]" for source in self._experts}
        storages = dict.fromkeys(sorted(targets), self.expert_storage)
        return write_config(storages | {"Linear": self.linear_storage}, self.left_in_float)


def _refuse_tied_experts(sources: Mapping[str, ExpertSource]) -> None:
    """Experts that two modules share would be written for one of them."""
    owners: dict[object, str] = {}
    for module, source in sources.items():
        other = owners.setdefault(source.layout.stored, module)
        if other != module:
            raise UnsupportedScheme(
                f"{module} and {other} have the same experts, which is not served from disk to disk; they can be "
                f"quantised when loaded: cpumoe.load_model(path, scheme={str(source.config.scheme)!r})"
            )


def _announced(
    storage: LinearStorage, name: str, rows: int, columns: int, scale: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    def dtype(suffix: str, accepted: tuple[str, ...]) -> torch.dtype:
        if accepted != FLOAT_DTYPES:
            return DTYPES[accepted[0]]
        return scale if suffix == storage.scale_suffix else torch.float32

    tensors = storage.tensors(rows, columns)
    return {f"{name}.{suffix}": (dtype(suffix, stored.dtypes), stored.shape) for suffix, stored in tensors.items()}


def _announced_copy(checkpoint: Checkpoint, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    info = checkpoint.info(name)
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{name} is {info.dtype}; accepted are {', '.join(DTYPES)}")
    return {name: (DTYPES[info.dtype], info.shape)}
