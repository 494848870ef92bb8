"""The families of models that are served: one row each.

Everything that differs from one to the next is a value here or in a row's functions. The reader, the quantiser and the
plug-ins ask this table, and no one asks for a model's name.
"""

from __future__ import annotations

from dataclasses import replace

from cpumoe.checkpoints.architectures.architecture import (
    BY_FUNCTION,
    BY_NUMBER,
    Architecture,
    AttentionBiases,
    FusedLayout,
    every_layer,
)
from cpumoe.checkpoints.architectures.layer_shapes import (
    Config,
    gated_mlp,
    grouped_attention_with_stated_depth,
    head_norms,
    head_norms_if_chosen,
    latent_attention,
    latent_norms,
    nothing,
    sinks,
    whole_norms,
)
from cpumoe.layers.activation import Activation


def _qwen_layers(config: Config) -> list[int]:
    dense, step = set(config.get("mlp_only_layers") or []), config.get("decoder_sparse_step", 1)
    return [i for i in every_layer(config) if i not in dense and (i + 1) % step == 0]


def _after_dense_layers(config: Config) -> list[int]:
    dense = config.get("first_k_dense_replace") or 0
    return [i for i in every_layer(config) if i >= dense]


def _llama4_layers(config: Config) -> list[int]:
    if (listed := config.get("moe_layers")) is not None:
        return [i for i in every_layer(config) if i in set(listed)]
    step = config.get("interleave_moe_layer_step", 1)
    return list(range(step - 1, config["num_hidden_layers"], step))


def _swiglu_oai(config: Config) -> Activation:
    return Activation("swiglu_oai", alpha=config.get("swiglu_alpha", 1.702), limit=config.get("swiglu_limit", 7.0))


_QWEN3 = Architecture(
    layers=_qwen_layers,
    attention_vectors=head_norms,
    dense=gated_mlp("mlp", "intermediate_size"),
)
_QWEN2 = replace(
    _QWEN3,
    shared_gates=("mlp.shared_expert_gate",),
    attention_biases=AttentionBiases("qkv_bias", ("q_proj", "k_proj", "v_proj")),
    attention_vectors=nothing,
    shared=gated_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
)
_GLM = Architecture(
    layers=_after_dense_layers,
    router_biases=("e_score_correction_bias",),
    attention_biases=AttentionBiases("attention_bias", ("q_proj", "k_proj", "v_proj")),
    attention_vectors=head_norms_if_chosen,
    dense=gated_mlp("mlp", "intermediate_size"),
    shared=gated_mlp("mlp.shared_experts", "moe_intermediate_size", "n_shared_experts"),
)
_DEEPSEEK = replace(
    _GLM,
    attention=latent_attention,
    attention_biases=AttentionBiases("attention_bias", ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")),
    attention_vectors=latent_norms,
)
_LLAMA4 = Architecture(
    experts_paths=("feed_forward.experts",),
    fused=FusedLayout(interleaved=False),
    intermediate_size_field="intermediate_size",
    layers=_llama4_layers,
    router_paths=("feed_forward.router",),
    attention=grouped_attention_with_stated_depth,
    dense=gated_mlp("feed_forward", "intermediate_size_mlp"),
    shared=gated_mlp("feed_forward.shared_expert", "intermediate_size"),
)

#: ``model_type`` of a config.json -> its family.
ARCHITECTURES: dict[str, Architecture] = {
    "qwen2_moe": _QWEN2,
    "qwen3_moe": _QWEN3,
    "olmoe": Architecture(intermediate_size_field="intermediate_size", attention_vectors=whole_norms),
    "deepseek_v2": replace(_DEEPSEEK, router_biases=(), topk_methods=("greedy", "group_limited_greedy")),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _GLM,
    "mixtral": Architecture(
        experts_paths=("mlp.experts", "block_sparse_moe.experts"),
        projections=(BY_FUNCTION, BY_NUMBER),
        intermediate_size_field="intermediate_size",
        router_paths=("mlp.gate", "block_sparse_moe.gate"),
        attention_biases=AttentionBiases("", ()),
    ),
    "gpt_oss": Architecture(
        fused=FusedLayout(interleaved=True),
        has_bias=True,
        intermediate_size_field="intermediate_size",
        activation=_swiglu_oai,
        router_paths=("mlp.router",),
        router_biases=("bias",),
        attention=grouped_attention_with_stated_depth,
        attention_vectors=sinks,
        plain_attention=False,
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
}
