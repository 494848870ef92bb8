"""Small random models of every mixture-of-experts architecture that transformers has.

A family's configuration is its class's default with the sizes of ``_SIZES`` for the fields which that class has, in all
parts alike (text, vision, audio), and with what the family's entry in ``FAMILIES`` says on top.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: By name of the field; a field that a configuration class does not have is left out. All sizes that experts may have
#: are multiples of 32.
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # with the usual 0.02 all logits are alike and rounding decides which is the largest
    "tie_word_embeddings": False,  # else a token's own logit is the largest
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Experts and dense layers.
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    # Attention.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    # Latent attention, and the indexer of its sparse form: fewer positions than a short prompt has.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 2,
    # Linear attention and state spaces.
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    # Towers of other inputs, and what follows them.
    "depth": 2,
    "depths": [1, 1],
    "num_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "position_embedding_size": 64,
    "deepstack_visual_indexes": [0, 1],
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "projector_hidden_size": 64,
    "projection_intermediate_size": 64,
    "output_proj_dims": 64,
    "num_mel_bins": 16,
    "n_mel_bins": 16,
    "mel_vocab_size": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "output_dim": 64,
    "downsample_hidden_size": 16,
    "thinker_hidden_size": 64,
    "num_code_groups": 4,
    "codebook_size": 32,
    "num_quantizers": 4,
    "upsample_rates": [2, 2],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 32,
    "subsampling_conv_channels": [16, 8],
}

#: Tokens that stand for images and the like get numbers from here on.
_FIRST_SPECIAL = 100

_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1}
_ONLY_SPARSE: dict[str, Any] = {"intermediate_size": 64}  # which is then the experts'
_SLIDING: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_INDEXED: dict[str, Any] = {**_LATENT, "layer_types": ["indexed_attention"] * 3}
_PLAIN_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of three axes, with how many frequencies each has."""
    return {"rope_parameters": {**_PLAIN_ROPE["rope_parameters"], "mrope_section": list(section), **more}}


@dataclass(frozen=True)
class TinyFamily:
    """How to make one tiny model."""

    name: str
    model_type: str
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    #: Whether ``generate`` works; else the model has another purpose, or is a body without a head.
    generates: bool = True
    #: Path of the part that takes ``input_ids`` where the model itself does not.
    forward: str = ""


def _text(name: str, class_name: str, **config: Any) -> TinyFamily:
    """A family whose ``model_type`` is its name."""
    return TinyFamily(name, name, class_name, config)


_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "n_groups": 2,
    "moe_shared_expert_intermediate_size": 64,
    "use_mamba_kernels": False,
}

_PLAIN = [
    _text("afmoe", "AfmoeForCausalLM", **_SLIDING),
    _text("axk1", "AXK1ForCausalLM", **_LATENT, **_GROUPS),
    _text("axk2", "AXK2ForCausalLM", **_INDEXED, gated_norm_rank=16),
    _text("bailing_hybrid", "BailingHybridForCausalLM", **_LATENT, **_LINEAR, num_expert_group=2, topk_group=1),
    _text("beam", "BeamForCausalLM", **_SLIDING, **_GROUPS),
    _text(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        **_TIED,
        **_SLIDING,
        prefix_dense_intermediate_size=96,
        intermediate_size=32,
        logit_scale=1.0,
    ),
    _text("deepseek_v2", "DeepseekV2ForCausalLM", **_LATENT, **_GROUPS, topk_method="group_limited_greedy"),
    _text("deepseek_v3", "DeepseekV3ForCausalLM", **_LATENT, **_GROUPS),
    _text("deepseek_v32", "DeepseekV32ForCausalLM", **_INDEXED, **_GROUPS),
    _text(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        num_key_value_heads=1,
        head_dim=32,
        partial_rotary_factor=0.5,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        swiglu_limit=1.0,
        o_groups=2,
        o_lora_rank=16,
        index_topk=4,
    ),
    _text("dots1", "Dots1ForCausalLM", **_SLIDING),
    _text("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_k=2, moe_num_shared_experts=1, moe_layer_end_index=2),
    _text("exaone_moe", "ExaoneMoeForCausalLM", **_SLIDING),
    _text("flex_olmo", "FlexOlmoForCausalLM", **_ONLY_SPARSE),
    _text("flint", "FlintForCausalLM", **_SLIDING, mlp_only_layers=[0]),
    _text("glm4_moe", "Glm4MoeForCausalLM"),
    _text("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **_LATENT),
    _text("glm_moe_dsa", "GlmMoeDsaForCausalLM", **_INDEXED, indexer_types=["full", "shared", "full"]),
    _text("gpt_oss", "GptOssForCausalLM", **_ONLY_SPARSE, **_SLIDING, **_PLAIN_ROPE),
    _text("granitemoe", "GraniteMoeForCausalLM", **_ONLY_SPARSE),
    _text("granitemoe_swa", "GraniteMoeSWAForCausalLM", **_ONLY_SPARSE, **_SLIDING),
    _text("granitemoehybrid", "GraniteMoeHybridForCausalLM", **_ONLY_SPARSE, **_LINEAR),
    _text("granitemoeshared", "GraniteMoeSharedForCausalLM", **_ONLY_SPARSE),
    _text("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", **_ONLY_SPARSE, moe_topk=2),
    _text("hy_v3", "HYV3ForCausalLM"),
    _text("hy_v4", "HYV4ForCausalLM", **_INDEXED, indexer_types=["full", "full", "shared"], swiglu_limit=1.0),
    _text(
        "jamba",
        "JambaForCausalLM",
        **_ONLY_SPARSE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_offset=0,
        use_mamba_kernels=False,
    ),
    _text("kimi_linear", "KimiLinearForCausalLM", **_LATENT, **_LINEAR, q_lora_rank=None),
    _text("kolibri1", "Kolibri1ForCausalLM", **_SLIDING),
    _text("laguna", "LagunaForCausalLM", **_SLIDING),
    _text("lfm2_moe", "Lfm2MoeForCausalLM", **_TIED, layer_types=["conv", "full_attention", "conv"]),
    _text("mellum", "MellumForCausalLM", **_SLIDING),
    _text("mimo_v2_flash", "MiMoV2FlashForCausalLM", **_SLIDING, head_dim=32),
    _text("minimax", "MiniMaxForCausalLM", **_ONLY_SPARSE, **_LINEAR, block_size=8),
    _text("minimax_m2", "MiniMaxM2ForCausalLM", **_ONLY_SPARSE),
    _text("mixtral", "MixtralForCausalLM", **_ONLY_SPARSE),
    _text("nemotron_h", "NemotronHForCausalLM", **_NEMOTRON),
    _text("olmoe", "OlmoeForCausalLM", **_ONLY_SPARSE),
    _text("phimoe", "PhimoeForCausalLM", **_ONLY_SPARSE),
    _text("qwen2_moe", "Qwen2MoeForCausalLM", **_TIED, mlp_only_layers=[1]),
    _text("qwen3_moe", "Qwen3MoeForCausalLM"),
    _text("qwen3_next", "Qwen3NextForCausalLM", **_LINEAR),
    _text("solar_open", "SolarOpenForCausalLM"),
    _text("zaya", "ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=32, initializer_range=0.3),
    # Not decorated with use_experts_implementation.
    _text(
        "dbrx",
        "DbrxForCausalLM",
        n_heads=4,
        n_layers=3,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 64, "moe_top_k": 2},
    ),
    _text("jetmoe", "JetMoeForCausalLM", **_ONLY_SPARSE, kv_channels=16),
    _text(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        **_LATENT,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        zero_expert_num=4,
    ),
]

#: Other forms of the plain ones.
_VARIANTS = [
    TinyFamily(
        "deepseek_v2_lite",  # queries without a latent, no groups of experts
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    ),
    TinyFamily(
        "nemotron_h_latent",  # experts' hidden size is not the model's
        "nemotron_h",
        "NemotronHForCausalLM",
        {**_NEMOTRON, "moe_latent_size": 32},
    ),
    TinyFamily(
        "qwen3_next_dense",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**_LINEAR, "mlp_only_layers": [0]},
    ),
]

#: The text part of models that also see or hear: what differs from the sizes.
_TEXT_PARTS: dict[str, dict[str, Any]] = {
    "aria": {**_ONLY_SPARSE, "moe_topk": 2, "moe_num_shared_experts": 1},
    "ernie4_5_vl_moe": {**_mrope(2, 2, 4), "moe_intermediate_size": [64, 32], "moe_k": 2, "moe_num_shared_experts": 1},
    "gemma4": {
        **_TIED,
        **_SLIDING,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    },
    "glm4v_moe": _mrope(1, 1, 2, partial_rotary_factor=0.5),
    "glm5_next": {
        **_LATENT,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "index_kpool": 2,
        "swiglu_limit": 1.0,
    },
    "inkling": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "sliding_window_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
        "route_scale": 2.0,
    },
    "llama4": {
        **_ONLY_SPARSE,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 2],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 16,
    },
    "minimax_m3_vl": {
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mistral4": {
        **_LATENT,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
    "mistral_large4": {
        **_INDEXED,
        "indexer_types": ["full", "shared", "full"],
        "no_rope_layers": [1, 0, 1],
        "kv_source_layers": [0, 1, 0],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.0,
        },
    },
    "muse_spark": {**_SLIDING, "moe_hidden_size": 32, "output_multiplier": 1.0},
    "qwen3_5_moe": {**_LINEAR, **_mrope(2, 1, 1, partial_rotary_factor=0.25), "head_dim": 32},
    "qwen3_omni_moe": {**_mrope(4, 2, 2), "sliding_window": None},
    "qwen3_vl_moe": {**_mrope(4, 2, 2), "sliding_window": None},
    "qwen4_exp": {
        **_mrope(4, 2, 2),
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {
        **_SLIDING,
        "share_expert_dim": 64,
        "num_sliding_attention_heads": 2,
        "swiglu_limits": [None, None, 1.0],
        "swiglu_limits_shared": [None, None, 1.0],
    },
    "deepseek_ocr2": {},
    "unlimited_ocr": {},
}


_SAM: dict[str, Any] = {
    "output_channels": 16,
    "downsample_channels": [32, 64],
    "mlp_dim": 64,
    "window_size": 2,
    "global_attn_indexes": [1],
}


def _whole(
    name: str, class_name: str, *, model_type: str | None = None, text_type: str | None = None, **config: Any
) -> TinyFamily:
    """A model of text and more with all its parts."""
    text = {**_TEXT_PARTS[name], **({} if text_type is None else {"model_type": text_type})}
    return TinyFamily(name, model_type or name, class_name, {"text_config": text, **config})


#: Qwen3-Omni's part that writes text. It uses a token id that is not a field.
_THINKER: dict[str, Any] = {"text_config": _TEXT_PARTS["qwen3_omni_moe"], "vision_start_token_id": 99}


def _part(name: str, class_name: str, model_type: str | None = None) -> TinyFamily:
    """The text part of such a model alone; without a head where transformers has no class with one."""
    text_type = model_type or f"{name}_text"
    return TinyFamily(f"{name}_text", text_type, class_name, _TEXT_PARTS[name], class_name.endswith("ForCausalLM"))


_MULTIMODAL = [
    _whole("aria", "AriaForConditionalGeneration", vision_config={"model_type": "idefics3_vision"}),
    _part("aria", "AriaTextForCausalLM"),
    _whole("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
    _part("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"),
    _whole("gemma4", "Gemma4ForConditionalGeneration", **_TIED),
    _part("gemma4", "Gemma4ForCausalLM"),
    _whole("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
    _part("glm4v_moe", "Glm4vMoeTextModel"),
    _whole("glm5_next", "Glm5NextForConditionalGeneration"),
    _part("glm5_next", "Glm5NextTextModel"),
    _whole(
        "inkling",
        "InklingForConditionalGeneration",
        model_type="inkling_mm_model",
        vision_config={"n_layers": 3, "patch_size": 2},
    ),
    _part("inkling", "InklingForCausalLM"),
    _whole(
        "llama4",
        "Llama4ForConditionalGeneration",
        vision_config={
            "intermediate_size": 256,  # four patches side by side
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    ),
    _part("llama4", "Llama4ForCausalLM"),
    _whole("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    _part("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    _whole(
        "mistral4",
        "Mistral3ForConditionalGeneration",
        model_type="mistral3",
        text_type="mistral4",
        vision_config={"model_type": "pixtral"},
    ),
    _part("mistral4", "Mistral4ForCausalLM", "mistral4"),
    _whole("mistral_large4", "MistralLarge4ForConditionalGeneration", vision_config={"model_type": "pixtral"}),
    # AutoModel reloads it; its own class only with config= given, since it takes config.json for that of the whole.
    _part("mistral_large4", "MistralLarge4TextModel"),
    _whole(
        "muse_spark",
        "MuseSparkForConditionalGeneration",
        audio_config={"num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [16, 32]},
        out_hidden_size=256,  # four patches side by side
    ),
    _part("muse_spark", "MuseSparkTextModel"),
    _whole("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    _part("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    TinyFamily(
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _THINKER,
    ),
    _part("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    _whole("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    _part("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    _whole("qwen4_exp", "Qwen4ExpForConditionalGeneration"),
    _part("qwen4_exp", "Qwen4ExpForCausalLM"),
    _whole("step3p7", "Step3p7ForConditionalGeneration"),
    _part("step3p7", "Step3p7TextModel", "step3p5"),
    _whole("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", vision_config={"sam_config": _SAM}),
    _part("deepseek_ocr2", "DeepseekOcr2TextModel"),
    _whole("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", vision_config={"sam_config": _SAM}),
    _part("unlimited_ocr", "UnlimitedOcrTextModel"),
]

#: Those that do something else than continue a text.
_OTHER_PURPOSE = [
    # Thinker, talker (its experts are another class) and what makes sound of its codes. It has no forward.
    TinyFamily(
        "qwen3_omni_moe",
        "qwen3_omni_moe",
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "thinker_config": _THINKER,
            "talker_config": {
                "text_config": {
                    **_mrope(4, 2, 2),
                    "sliding_window": None,
                    "shared_expert_intermediate_size": 64,
                },
                "code_predictor_config": {"layer_types": ["full_attention"] * 3},
                "accept_hidden_layer": 1,
                "spatial_merge_size": 2,
            },
        },
        generates=False,
        forward="thinker",
    ),
    TinyFamily(
        "openai_privacy_filter",
        "openai_privacy_filter",
        "OpenAIPrivacyFilterForTokenClassification",
        {**_ONLY_SPARSE, **_PLAIN_ROPE},
        generates=False,
    ),
    TinyFamily(
        "diffusion_gemma",
        "diffusion_gemma",
        "DiffusionGemmaForBlockDiffusion",  # needs decoder_input_ids [batch, 8] too, else draws them
        {
            **_TIED,  # encoder and decoder too
            "text_config": {
                **_TIED,
                **_SLIDING,
                "top_k_experts": 2,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
            },
            "vision_config": {"model_type": "gemma4_vision"},
            "canvas_length": 8,
        },
        generates=False,
    ),
]

#: Every class of transformers 5.22 that has the decorator use_experts_implementation, and those without it that hold
#: experts (dbrx, jetmoe, llama4, longcat_flash, step3p7), are part of one of these; none had to be left out.
FAMILIES: dict[str, TinyFamily] = {
    family.name: family for family in [*_PLAIN, *_VARIANTS, *_MULTIMODAL, *_OTHER_PURPOSE]
}

#: Families that together have every kind of layer, router, experts module and weight mapping. `make test` runs for
#: these what takes long, `make test-all` for all.
REPRESENTATIVES = {
    *("dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v4", "diffusion_gemma", "gemma4", "gpt_oss"),
    *("granitemoehybrid", "jamba", "jetmoe", "kimi_linear", "lfm2_moe", "llama4", "longcat_flash", "mimo_v2_flash"),
    *("minimax", "mistral4", "mixtral", "nemotron_h", "phimoe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
}


def representatives_first(names: Iterable[str]) -> list[Any]:
    """Return test parameters for families: ``make test`` runs the representatives, ``make test-all`` the others."""
    return [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.full) for name in names]


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a family.

    ``changes`` are values of its fields; those that only the text part of a larger model has go there.
    """
    from transformers import CONFIG_MAPPING

    family = FAMILIES[name]
    config_class = CONFIG_MAPPING[family.model_type]
    values = _values(config_class, family.config)
    names = {entry.name for entry in dataclasses.fields(config_class)}
    text = values.get("text_config")
    for key, value in changes.items():
        target = text if text is not None and key not in names else values
        target[key] = value
    return config_class(**values)


def _values(config_class: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a configuration class: the sizes that it has fields for, what is given, and the same for its parts."""
    from transformers import CONFIG_MAPPING, AutoConfig

    names = [entry.name for entry in dataclasses.fields(config_class)]
    values = {name: copy.deepcopy(_SIZES[name]) for name in names if name in _SIZES}
    special = [name for name in names if name.endswith(("_token_id", "_token_index")) and name not in _SIZES]
    values |= {name: _FIRST_SPECIAL + position for position, name in enumerate(special)}
    values |= copy.deepcopy(dict(given))
    for part, part_class in config_class.sub_configs.items():
        part_given = values.get(part, {})
        if part_given is None:  # a part that this model does without
            continue
        if part_class is AutoConfig:
            part_class = CONFIG_MAPPING[part_given["model_type"]]
        values[part] = _values(part_class, part_given)
    return values


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A family's model with random weights; ``changes`` are values of its configuration."""
    config = tiny_config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family_class(name)(config)
        _disturb(model)
    _cast(model, dtype)
    return model.eval()


def write_family(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Writes a family's model as transformers does."""
    tiny_model(name, seed=seed, dtype=dtype, **changes).save_pretrained(folder)
    return folder


def family_class(name: str) -> Any:
    """The class of a family's model, also one that transformers does not export."""
    import transformers

    class_name = FAMILIES[name].class_name
    if hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    module = type(tiny_config(name)).__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(module), class_name)


def logits_of(model: PreTrainedModel, name: str, ids: torch.Tensor) -> torch.Tensor:
    """What a family's model gives for ids [batch, tokens]: logits, or hidden states if it has no head; fp32."""
    family = FAMILIES[name]
    part = getattr(model, family.forward) if family.forward else model
    more = {"decoder_input_ids": ids[:, :8]} if name == "diffusion_gemma" else {}
    with torch.no_grad():
        out = part(input_ids=ids, **more)
    logits = getattr(out, "logits", None)
    return (out[0] if logits is None else logits).float()


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that are in checkpoints, not those that are computed; tied ones once."""
    names = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in names:
            yield name, tensor


@torch.no_grad()
def _disturb(model: PreTrainedModel) -> None:
    """Gives everything that starts as a constant random values too.

    Biases start as zeros and norms as ones: one that is lost or swapped would not be noticed.
    """
    for name, tensor in _stored(model):
        if name.endswith("tid2eid"):  # DeepSeek V4's experts by token
            experts = model.config.n_routed_experts
            tensor.copy_(torch.stack([torch.randperm(experts)[: tensor.shape[1]] for _ in tensor]))
        elif name.startswith("talker.") and ".experts." in name:  # transformers leaves them uninitialised
            tensor.normal_(0.0, _SIZES["initializer_range"])
        elif tensor.is_floating_point() and (tensor.dim() == 1 or tensor.amin() == tensor.amax()):
            tensor += 0.1 * torch.randn_like(tensor)
        if name.endswith("balancing_biases"):  # from_pretrained sets Zaya's last to this whatever the file says
            tensor[-1] = -1.0


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """As ``from_pretrained`` does: what is computed stays as it is (``model.to`` makes complex buffers real)."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, tensor in _stored(model):
        if tensor.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.data.to(dtype)
