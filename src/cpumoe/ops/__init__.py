"""The operators: ``torch.ops.cpumoe.*`` and what calls them from Python. Nothing else computes with the core."""

from cpumoe.ops.attention import decode_attention, rms_norm
from cpumoe.ops.cache_records import cache_record_bytes, from_cache_records, to_cache_records
from cpumoe.ops.float_products import token_linear
from cpumoe.ops.latent_attention import latent_attention
from cpumoe.ops.packing import (
    ROWS_GATE_THEN_UP,
    ROWS_GATE_UP_INTERLEAVED,
    ROWS_PLAIN,
    PackedBuilder,
    PackedSpec,
    pack,
    read_spec,
    scale_dtype,
    scales_name,
    unpack,
)
from cpumoe.ops.products import fused_experts, linear
from cpumoe.ops.recurrent import gated_delta_rule, short_convolution
from cpumoe.ops.registration import refuse_gradient, wants_gradient
from cpumoe.ops.routing import SCORING, router_logits, select_experts
from cpumoe.ops.state_space import lightning_attention, mamba2, mamba_convolution, selective_scan

__all__ = [
    "ROWS_GATE_THEN_UP",
    "ROWS_GATE_UP_INTERLEAVED",
    "ROWS_PLAIN",
    "SCORING",
    "PackedBuilder",
    "PackedSpec",
    "cache_record_bytes",
    "decode_attention",
    "from_cache_records",
    "fused_experts",
    "gated_delta_rule",
    "latent_attention",
    "lightning_attention",
    "linear",
    "mamba2",
    "mamba_convolution",
    "pack",
    "read_spec",
    "refuse_gradient",
    "rms_norm",
    "router_logits",
    "scale_dtype",
    "scales_name",
    "select_experts",
    "selective_scan",
    "short_convolution",
    "to_cache_records",
    "token_linear",
    "unpack",
    "wants_gradient",
]
