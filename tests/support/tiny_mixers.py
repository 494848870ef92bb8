"""Tiny models whose layers are not all attention: configs of each family, three layers or so."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # with the usual 0.02 all logits are alike
    "pad_token_id": 0,
}

MAMBA2: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_chunk_size": 8,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "chunk_size": 8,
    },
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "zamba2": {
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "attention_head_dim": 32,
        "chunk_size": 8,
    },
}

MAMBA: dict[str, dict[str, Any]] = {
    "jamba": {
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "mamba": {"state_size": 16},
}

LIGHTNING: dict[str, dict[str, Any]] = {
    "minimax": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
}

MIXERS = {**MAMBA2, **MAMBA, **LIGHTNING}


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A model of random weights, always the same for an architecture; none of its parameters is all ones or zeros."""
    config = transformers.AutoConfig.for_model(architecture, **{**_SIZES, **MIXERS[architecture], **changes})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in ("A_log", "D", "dt_bias", "bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model
