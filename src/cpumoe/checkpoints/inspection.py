"""What a checkpoint is, what of it would be loaded and into how much memory, and what would stop the load.

Headers, config.json and the description of the model tell all of that, and no weights are read unless that is asked
for. What is wrong is found by the checks that a load makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from math import prod
from typing import Any, ParamSpec, TypeVar

from cpumoe import cpu
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.contents import Part, Problems, bits_per_weight, experts_bytes, experts_weights, offers, total
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.layer_names import EXPERT
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.loading import find_experts, load_experts
from cpumoe.checkpoints.model_layout import Describe, ModelLayout
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.checkpoints.tensor_kinds import NOT_LOADED, ORDER, kinds_of
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import Scheme

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Survey:
    """All that headers and config.json tell. What is wrong is noted and does not keep the rest from being found out."""

    def __init__(
        self, checkpoint: Checkpoint, describe: Describe, scheme: Scheme | None = None, *, deep: bool = False
    ) -> None:
        """Looks at everything but the weights.

        Args:
            checkpoint: to look at.
            describe: finds out what its model has, and where.
            scheme: what the experts of a float checkpoint would be quantised to.
            deep: reads and packs all weights too, a module at a time, if nothing else is wrong.
        """
        self.values_read = False
        self.checkpoint = checkpoint
        self._scheme = scheme
        self._sentences: list[str] = []
        self._check = TensorCheck(checkpoint)
        self.is_quantized = checkpoint.quantization_section is not None
        if self.is_quantized and scheme is not None:
            raise UnsupportedScheme(f"scheme {scheme} for a checkpoint that is quantised already; leave it out")
        refuse_stored_input_scales(scheme)
        is_served = not self.is_quantized or self._try(lambda: checkpoint.quantization) is not None
        self._kv_cache = checkpoint.kv_cache_use(None) if is_served else None
        self._try(checkpoint.check_config)
        self.layout: ModelLayout | None = None if self._sentences and is_served else self._try(describe, checkpoint)
        self.sources: dict[str, ExpertSource] = {}
        self.linears: dict[str, LinearSource] = {}
        if self.layout is not None and is_served:
            found = {e.module: self._try(find_experts, checkpoint, e, scheme) for e in self.layout.experts}
            self.sources = {module: source for module, source in found.items() if source is not None}
            self.linears = self._try(quantized_linears, checkpoint, self.layout) or {}
            understood = self.layout
            if len(self.sources) < len(understood.experts):  # tensors of the others are not called wrong
                understood = replace(understood, left_out=understood.left_out | understood.of_experts.keys())
            self._try(check_model, understood, self.sources.values(), self.linears, self._check)
            if not self.problems:  # else a load would not get to values, and would name those tensors alone
                self._check.compare_known()
            if deep and not self.problems:
                self._pack_all()
        self._module_of = self._experts_tensors()
        self._kinds = kinds_of(checkpoint, self.layout, self._module_of)
        self.parts = self._parts()

    def _try(self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T | None:
        try:
            return function(*arguments, **named)
        except ValueError as problem:
            if str(problem) not in self._sentences:  # many layers may have the same
                self._sentences.append(str(problem))
            return None

    def _pack_all(self) -> None:
        """Read all weights as a load does, which refuses values that there cannot be."""
        for source in self.sources.values():
            self._try(load_experts, source)
        for linear in self.linears.values():
            self._try(linear.load)
        self.values_read = True

    @property
    def problems(self) -> Problems:
        lists = (self._check.missing, self._check.wrong, self._check.extra, self._sentences)
        return Problems(*(list(dict.fromkeys(found)) for found in lists))  # two checks may find the same

    def _experts_tensors(self) -> dict[str, str]:
        """Tensors of routed experts -> the module that they belong to."""
        layout = self.layout
        found = {} if layout is None else dict(layout.of_experts)
        known = () if layout is None else (found, layout.routers, layout.tensors, layout.left_out)
        for name in self.checkpoint.names:  # of a model that is not known, or too many
            match = EXPERT.search(name)
            if match is not None and not any(name in names for names in known):
                found[name] = name[: match.end()].removesuffix(".")
        return found

    # ---- what is there ---------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        parts: dict[tuple[str, str | None, str], Part] = {}
        modules: dict[tuple[str, str | None, str], set[str]] = defaultdict(set)
        float_bytes = cpu.float_dtype()[0].itemsize
        for name, kind in self._kinds.items():
            info, module = self.checkpoint.info(name), self._module_of.get(name, name.rpartition(".")[0])
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
            return linear.rows * linear.columns, self._try(linear.packed_bytes) or 0
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
        layout, problems, config = self.layout, self.problems, self.checkpoint.text_config
        first = layout.experts[0] if layout is not None and layout.experts else None
        return {
            "folder": str(self.checkpoint.folder),
            "files": len(self.checkpoint.files),
            "model_type": config.get("model_type") if layout is None else layout.model_type,
            "layers": config.get("num_hidden_layers") if layout is None else layout.layer_count,
            "hidden_size": config.get("hidden_size") if layout is None else layout.hidden_size,
            "experts": None
            if layout is None or first is None
            else {
                "layers": len(layout.experts),
                "count": first.shape.expert_count,
                "per_token": first.per_token,
                "intermediate_size": first.shape.intermediate_size,
                "activation": str(first.shape.activation),
                "disk_bits_per_weight": bits_per_weight(sum(part.disk_bytes for part in experts), weights),
                "memory_bits_per_weight": bits_per_weight(total([part.memory_bytes for part in experts]), weights),
            },
            "quantized": self.is_quantized,
            "kv_cache": self._kv_cache,
            "parts": [asdict(part) | {"held": part.description} for part in self.parts],
            "parameters": total([part.parameters for part in self.parts if part.kind != NOT_LOADED]),
            "disk_bytes": sum(part.disk_bytes for part in self.parts),
            "memory_bytes": total([part.memory_bytes for part in self.parts]),
            "float_dtype": str(dtype).removeprefix("torch."),
            "float_dtype_reason": reason,
            "schemes": self.offers(),
            "loads": not problems,
            "values_read": self.values_read,
            "problems": asdict(problems),
        }
