"""Small random models of every family with latent attention, made from their config classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "head_dim": 8,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "zero_expert_num": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 6,  # fewer than the tokens of the tests: the indexer has a choice to make
    "index_n_heads": 2,
    "index_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "gated_norm_rank": 8,
}

#: Each family with latent attention, and what differs from the common sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": {},
    "axk2": {},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "deepseek_v2": {"q_lora_rank": None},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "glm4_moe_lite": {},
    "glm5_next_text": {
        "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"],
        "indexer_types": ["full", "full", "shared"],
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
    },
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "hy_v4": {"indexer_types": ["full", "shared", "full"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "longcat_flash": {},
    "minicpm3": {},
    "mistral4": {},
    "mistral_large4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "youtu": {},
}


def tiny_latent_model(
    family: str, *, attention: str | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """A model of random weights, the same ones every time."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in _COMMON.items() if name in known}
    config = config_class(**{**sizes, **FAMILIES[family], **changes})
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: nn.Module = auto.from_config(config, attn_implementation=attention, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("sinks", "bias")) or "norm" in name:
                    parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.2)
    return model.eval()
