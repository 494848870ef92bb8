"""What a checkpoint is, what of it would be loaded and into how much memory, and what would stop the load.

Headers and config.json tell all of that: no weights are read, and transformers is not needed. What is wrong with
experts and quantised linears is found by the checks that a load makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any, ParamSpec, TypeVar

from cpumoe import cpu
from cpumoe.checkpoints.architectures import text_config
from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.contents import Part, Problems, bits_per_weight, experts_bytes, experts_weights, offers, total
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.layer_names import (
    EXPERT,
    architecture_if_needed,
    check_layers_behind,
    layers_prefix,
    prediction_layers,
)
from cpumoe.checkpoints.linear_sources import find_linears
from cpumoe.checkpoints.loading import check_experts, expert_modules, find_experts
from cpumoe.checkpoints.model_tensors import ModelTensors
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.checkpoints.tensor_kinds import NOT_LOADED, ORDER, kinds_of
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import Scheme

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Makes the whole configuration of config.json; None where nobody can be asked, ValueError for what is wrong with it.
CompleteConfig = Callable[[Mapping[str, Any]], dict[str, Any] | None]


class Survey:
    """All that headers and config.json tell. What is wrong is noted and does not keep the rest from being found out."""

    def __init__(
        self, checkpoint: Checkpoint, scheme: Scheme | None = None, complete: CompleteConfig | None = None
    ) -> None:
        """Looks at everything but the weights.

        Args:
            checkpoint: to look at.
            scheme: what the experts of a float checkpoint would be quantised to.
            complete: adds to config.json what the model's class would; None to take it as it stands.
        """
        self.checkpoint = checkpoint
        self._scheme = scheme
        self._sentences: list[str] = []
        self._check = TensorCheck(checkpoint, read_values=True)
        self.is_quantized = checkpoint.quantization_section is not None
        if self.is_quantized and scheme is not None:
            raise UnsupportedScheme(f"scheme {scheme} for a checkpoint that is quantised already; leave it out")
        if scheme is not None:
            refuse_stored_input_scales(scheme)
        is_served = not self.is_quantized or self._try(lambda: checkpoint.quantization) is not None
        self.architecture = self._try(architecture_if_needed, checkpoint)
        self._try(checkpoint.check_config)
        completed = None if complete is None else self._try(complete, checkpoint.config)
        self.config = text_config(completed or checkpoint.config)
        self.facts = None
        if self.architecture is not None and self._try(lambda: checkpoint.facts) is not None:
            self.facts = self._try(self.architecture.facts, self.config)
        self._try(layers_prefix, checkpoint)
        self._kinds = kinds_of(checkpoint, self.architecture, self._try(prediction_layers, checkpoint) or ())
        self.sources = self._find_experts() if is_served else {}
        self.linears = (self._try(find_linears, checkpoint, self._check) if is_served else None) or {}
        if is_served:
            self._try(check_layers_behind, checkpoint, self._check)
            self._try(self._check_tensors)
        self.parts = self._parts()

    def _try(self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T | None:
        try:
            return function(*arguments, **named)
        except ValueError as problem:
            if str(problem) not in self._sentences:  # many layers may have the same
                self._sentences.append(str(problem))
            return None

    @property
    def problems(self) -> Problems:
        lists = (self._check.missing, self._check.wrong, self._check.extra, self._sentences)
        return Problems(*(list(dict.fromkeys(found)) for found in lists))  # two checks may find the same

    def _find_experts(self) -> dict[str, ExpertSource]:
        """The experts of every layer that has them where they should be, by the prefix of their names on disk."""
        if self.facts is None or self.architecture is None:
            return {}
        architecture, facts = self.architecture, self.facts
        found = {
            module: self._try(find_experts, self.checkpoint, architecture, module, facts, self._scheme)
            for module in self._try(expert_modules, self.checkpoint, architecture, facts) or ()
        }
        sources = {module: source for module, source in found.items() if source is not None}
        check_experts(architecture, sources, self._check)
        return {source.prefix: source for source in sources.values()}

    def _check_tensors(self) -> None:
        tensors = ModelTensors(self.checkpoint, self.config, self.architecture, self._kinds, self.linears, self._check)
        tensors.check_modules()
        if self.architecture is not None and self.facts is not None:
            tensors.check_model(self.architecture, self.facts, layers_prefix(self.checkpoint))

    # ---- what is there ---------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        parts: dict[tuple[str, str | None, str], Part] = {}
        modules: dict[tuple[str, str | None, str], set[str]] = defaultdict(set)
        float_bytes = cpu.float_dtype()[0].itemsize
        for name, kind in self._kinds.items():
            info, module = self.checkpoint.info(name), name.rpartition(".")[0]
            if kind == "experts" and (match := EXPERT.search(name)) is not None:
                module = name[: match.end()].removesuffix(".")
            key = (kind, *self._scheme_and_format(module))
            part = parts.setdefault(key, Part(*key))
            modules[key].add(module)
            part.disk_bytes += info.bytes
            part.dtypes = sorted({*part.dtypes, info.dtype})
            if part.scheme is not None:
                continue
            if info.dtype not in FLOAT_DTYPES and kind != NOT_LOADED:  # how many values that is, the scheme would know
                part.parameters = part.memory_bytes = None
            elif part.parameters is not None and part.memory_bytes is not None:
                part.parameters += prod(info.shape)
                each = DTYPES[info.dtype].itemsize if kind == "experts" else float_bytes  # experts stay as they are
                part.memory_bytes += 0 if kind == NOT_LOADED else prod(info.shape) * each
        for key, part in parts.items():
            part.modules = len(modules[key])
            if part.scheme is not None:
                sizes = [self._packed_size(module) for module in sorted(modules[key])]
                part.parameters, part.memory_bytes = sum(s[0] for s in sizes), sum(s[1] for s in sizes)
        return sorted(parts.values(), key=lambda part: (ORDER.index(part.kind), str(part.scheme), part.format))

    def _scheme_and_format(self, module: str) -> tuple[str | None, str]:
        """Scheme of a module in memory (None for float) and its format on disk."""
        source = self.sources.get(module)
        storage = self.linears[module].storage if module in self.linears else source and source.storage
        if storage:
            return str(storage.scheme), storage.format
        return None if source is None or self._scheme is None else str(self._scheme), "float"

    def _packed_size(self, module: str) -> tuple[int, int]:
        """Number of weights of a packed module (scales and biases do not count), and its bytes in memory."""
        if module in self.linears:
            linear = self.linears[module]
            return linear.rows * linear.columns, self._try(lambda: linear.packed_bytes) or 0
        source = self.sources[module]
        size = self._try(experts_bytes, source.config, source.storage, source.input_scales)
        return experts_weights(source.config), size or 0

    # ---- the whole of it -------------------------------------------------------------------------------------------

    def offers(self) -> list[dict[str, Any]]:
        """What the experts of a float checkpoint would take, for every scheme that fits."""
        if self.is_quantized or self._scheme is not None:
            return []
        return offers([source.config for source in self.sources.values()])

    def to_json(self) -> dict[str, Any]:
        experts = [part for part in self.parts if part.kind == "experts"]
        weights = total([part.parameters for part in experts])
        dtype, reason = cpu.float_dtype()
        facts, problems = self.facts, self.problems
        return {
            "folder": str(self.checkpoint.folder),
            "files": len(self.checkpoint.files),
            "model_type": self.config.get("model_type"),
            "layers": self.config.get("num_hidden_layers"),
            "hidden_size": self.config.get("hidden_size"),
            "experts": None
            if facts is None
            else {
                "layers": len(facts.layers),
                "count": facts.expert_count,
                "per_token": facts.topk,
                "intermediate_size": facts.intermediate_size,
                "activation": str(facts.activation),
                "disk_bits_per_weight": bits_per_weight(sum(part.disk_bytes for part in experts), weights),
                "memory_bits_per_weight": bits_per_weight(total([part.memory_bytes for part in experts]), weights),
            },
            "quantized": self.is_quantized,
            "parts": [asdict(part) | {"held": part.description} for part in self.parts],
            "parameters": total([part.parameters for part in self.parts if part.kind != NOT_LOADED]),
            "disk_bytes": sum(part.disk_bytes for part in self.parts),
            "memory_bytes": total([part.memory_bytes for part in self.parts]),
            "float_dtype": str(dtype).removeprefix("torch."),
            "float_dtype_reason": reason,
            "schemes": self.offers(),
            "loads": not problems,
            "problems": asdict(problems),
        }
