"""A text, a tokenizer that was trained on it, and a small mixture-of-experts model with that vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """The quick brown fox of the café jumps over the lazy dog, and
the dog, which is not as lazy as it looks, jumps after it. Whether they meet again is not known.
There are other foxes, and other dogs, in other woods.
"""
EXPERTS = 8
POSITIONS = 48
VOCABULARY = 300


def tiny_tokenizer() -> Any:
    """Byte-level, so that every text has tokens; it knows some pairs from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 10, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tiny_model(**options: Any) -> Any:
    torch.manual_seed(1)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": POSITIONS,
        "decoder_sparse_step": 1,
        "initializer_range": 0.2,  # large, so that predictions are far from uniform and differ with the context
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(settings | options))).eval()
