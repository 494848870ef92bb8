"""Model folders small enough to be made anew for each test: random weights, a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # with the usual 0.02 all logits are alike and rounding decides the answers
    "tie_word_embeddings": False,
}

# What each architecture calls its sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SENTENCES = [
    "The experts that a token does not choose cost it nothing.",
    "A router reads the token and names the experts; they answer and their answers are added.",
]


def write_tiny_tokenizer(folder: Path, *, chat_template: str | None = _CHAT_TEMPLATE) -> int:
    """Writes a byte-level BPE tokenizer of about 300 tokens, in which any text can be said; returns its size.

    Tokens 0 to 3 are ``<pad>``, ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_and_merges = Tokenizer(models.BPE())
    bytes_and_merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_and_merges.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytes_and_merges.train_from_iterator(_SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_and_merges, pad_token="<pad>", eos_token="<|im_end|>", chat_template=chat_template
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_tiny_model(folder: Path, architecture: str = "qwen3_moe", *, seed: int = 0, **sizes: int) -> Path:
    """Writes a model of ``architecture`` (one of ``ARCHITECTURES``) in fp32 to ``folder``, and returns ``folder``.

    ``sizes`` replace those of the configuration.

    It never ends an answer by itself when decoding greedily: how long an answer is, is up to the test.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    vocab_size = write_tiny_tokenizer(folder)
    tokens = {"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    config = AutoConfig.for_model(architecture, **{**_SIZES, **tokens, **ARCHITECTURES[architecture], **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[:4] = 0  # logit 0 for the special tokens: the best of 300 random ones is above it
    model.generation_config = GenerationConfig(eos_token_id=3, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def write_dense_model(folder: Path, scheme: str) -> Path:
    """Writes a Llama, which has no experts, with all its linears quantised, the head too; returns its folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import cpumoe

    config = LlamaConfig(**{**_SIZES, "vocab_size": 128, "tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "float")
    packed = cpumoe.load_model(folder / "float", scheme="float", linears=scheme, dtype=torch.float32)
    packed.save_pretrained(folder / "packed")
    return folder / "packed"
