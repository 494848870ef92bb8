"""What a checkpoint holds: its tensors by kind, what of them takes how much memory, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import EXPERT, QUANTIZED_SUFFIXES, LinearSource
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.scheme import Scheme

_OFFERED = tuple(map(Scheme.parse, ("w8a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w4a8")))

NOT_LOADED = "not loaded"
OTHER = "other"
# The first pattern that fits a name decides; routers come before these, from the table of architectures.
KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (NOT_LOADED, r"vision|multi_modal_projector|rotary_emb\.inv_freq$"),
        ("experts", EXPERT.pattern),
        ("norms", r"norm\w*\.(weight|bias)$"),
        ("shared experts", r"\.shared_experts?\."),
        ("attention", r"\.(self_attn|attn|attention)\."),
        ("dense mlp", r"\.(mlp|feed_forward|block_sparse_moe)\."),
        ("embeddings", r"(^|\.)embed_tokens\."),
        ("lm_head", r"(^|\.)lm_head\."),
    )
)
ORDER = (
    "experts",
    "shared experts",
    "router",
    "attention",
    "dense mlp",
    "embeddings",
    "lm_head",
    "norms",
    OTHER,
    NOT_LOADED,
)
LINEARS = ("shared experts", "attention", "dense mlp", "lm_head")  # whose weights a tool may quantise
SUFFIXES = ("weight", "bias", "sinks", "e_score_correction_bias", *QUANTIZED_SUFFIXES)  # of layers without experts
PER_MLP = ("shared experts", "dense mlp", "router")  # what layers with experts and layers without differ in


@dataclass
class Part:
    """Modules of one kind that are held alike. None stands for what cannot be told of a scheme that is not served."""

    kind: str
    scheme: str | None  # in memory; None for float
    form: str  # on disk
    modules: int = 0
    parameters: int | None = 0
    disk_bytes: int = 0
    memory_bytes: int | None = 0
    dtypes: list[str] = field(default_factory=list)  # on disk

    @property
    def held(self) -> str:
        """Scheme and form in words."""
        stored = "/".join(self.dtypes)
        if self.memory_bytes is None:
            return f"not served ({stored})"
        if self.scheme is None:
            return f"float ({stored})"
        return f"{self.scheme}, from float ({stored})" if self.form == "float" else f"{self.scheme}, {self.form}"


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


def experts_bytes(config: MoEConfig) -> int:
    """Bytes of the packed experts of one layer."""
    rows, gated = config.activation.gate_up_rows(config.intermediate_size), bool(config.activation.gated)
    sizes = ((rows, config.hidden_size, gated), (config.hidden_size, config.intermediate_size, False))
    specs = (
        packed_spec(
            config.scheme, config.scale_dtype, config.local_experts, *size, gated=gated, has_bias=config.has_bias
        )
        for *size, gated in sizes
    )
    return sum(spec.packed_bytes for spec in specs)


def linear_bytes(checkpoint: Checkpoint, linear: LinearSource) -> int:
    """Bytes of a packed linear."""
    scheme, scale = linear.format.scheme, f"{linear.name}.weight_scale"
    scheme.check_inputs(linear.columns, linear.name)
    dtype = torch.bfloat16 if scale in checkpoint and checkpoint.info(scale).dtype == "BF16" else torch.float32
    return packed_spec(scheme, dtype, 1, linear.rows, linear.columns, has_bias=linear.has_bias).packed_bytes


def offers(configs: list[MoEConfig]) -> list[dict[str, Any]]:
    """What the experts of all layers would take, for every scheme that fits."""
    found = []
    for scheme in _OFFERED if configs else ():
        try:
            held = [replace(config, scheme=scheme) for config in configs]
        except UnsupportedScheme:
            continue
        size, weights = sum(map(experts_bytes, held)), sum(map(experts_weights, held))
        found.append({"scheme": str(scheme), "memory_bytes": size, "bits_per_weight": bits_per_weight(size, weights)})
    return found


def bits_per_weight(size: int | None, weights: int | None) -> float | None:
    return round(8 * size / weights, 3) if size is not None and weights else None


def total(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)
