"""What an inspection finds: parts of a model with their sizes, and problems."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.scheme import Scheme

_OFFERED = tuple(map(Scheme.parse, ("w8a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w4a8")))


@dataclass
class Part:
    """Modules of one kind that are stored alike. None stands for what is not known of a scheme that is not served."""

    kind: str
    scheme: str | None  # in memory; None for float
    format: str  # on disk; "float" for weights that are not quantised
    modules: int = 0
    parameters: int | None = 0
    disk_bytes: int = 0
    memory_bytes: int | None = 0
    dtypes: list[str] = field(default_factory=list)  # on disk

    @property
    def description(self) -> str:
        """Scheme and format in words."""
        stored = "/".join(self.dtypes)
        if self.memory_bytes is None:
            return f"not served ({stored})"
        if self.scheme is None:
            return f"float ({stored})"
        return f"{self.scheme}, from float ({stored})" if self.format == "float" else f"{self.scheme}, {self.format}"


@dataclass
class Problems:
    """What would stop the load: names of tensors (with what is wrong), and sentences for everything else."""

    missing: list[str]
    wrong: list[str]
    unexpected: list[str]
    other: list[str]

    def __bool__(self) -> bool:
        return any((self.missing, self.wrong, self.unexpected, self.other))


def experts_weights(config: MoEConfig) -> int:
    """Number of weights of one layer's experts."""
    rows = config.activation.gate_up_rows(config.intermediate_size)
    return config.local_experts * config.hidden_size * (rows + config.intermediate_size)


def experts_bytes(config: MoEConfig, storage: LinearStorage | None = None, input_scales: int = 0) -> int:
    """Bytes of the packed experts of one layer.

    ``storage`` is that of its linears, None for float; ``input_scales`` are the stored ones of the first product.
    """
    ordered = storage is not None and storage.has_input_order
    rows, gated = config.activation.gate_up_rows(config.intermediate_size), bool(config.activation.gated)
    sizes = ((rows, config.hidden_size, gated), (config.hidden_size, config.intermediate_size, False))
    specs = (
        packed_spec(
            config.scheme,
            config.scale_dtype,
            config.local_experts,
            *size,
            gated=gated,
            has_bias=config.has_bias,
            input_orders=(2 if gated else 1) if ordered else 0,
            input_scales=min(input_scales, 2 if gated else 1),
        )
        for *size, gated in sizes
    )
    return sum(spec.packed_bytes for spec in specs)


def offers(configs: list[MoEConfig]) -> list[dict[str, Any]]:
    """What the experts of all layers would take, for every scheme that fits."""
    found = []
    for scheme in _OFFERED if configs else ():
        try:
            quantized = [replace(config, scheme=scheme) for config in configs]
        except UnsupportedScheme:
            continue
        size, weights = sum(experts_bytes(config) for config in quantized), sum(map(experts_weights, quantized))
        found.append({"scheme": str(scheme), "memory_bytes": size, "bits_per_weight": bits_per_weight(size, weights)})
    return found


def bits_per_weight(size: int | None, weights: int | None) -> float | None:
    return round(8 * size / weights, 3) if size is not None and weights else None


def total(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)
