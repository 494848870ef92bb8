"""Configurations of the tiny families with one field changed, to compare native decoders with the models' own code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from every_architecture import tiny_config

#: Fields that no computation depends on, whose values only make a model larger, or that size a tower for images.
_LEFT_OUT = {
    *("architectures", "dtype", "id2label", "label2id", "problem_type", "initializer_range", "vocab_size"),
    *("num_hidden_layers", "hidden_size", "return_dict", "is_encoder_decoder", "tie_word_embeddings", "vision_config"),
    *("audio_config", "chunk_size_feed_forward", "use_mamba_kernels", "transformers_version"),
    # Indexers whose scores are exactly 0 for many tokens, or that leave a token none to attend to: their choice then
    # depends on the order of sums.
    *("index_head_dim", "index_n_heads", "index_topk", "index_kpool_always_select_tail"),
}
_FUNCTIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "tanh")
_WORDS: dict[str, tuple[str, ...]] = {
    "hidden_act": _FUNCTIONS,
    "hidden_activation": _FUNCTIONS,
    "scoring_func": ("softmax", "sigmoid"),
    "score_function": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}
_SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.25},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", **_SCALED},
    {"rope_type": "yarn", **_SCALED},
    {"rope_type": "yarn", **_SCALED, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", **_SCALED, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "yarn", **_SCALED, "llama_4_scaling_beta": 0.2},
    {"rope_type": "llama3", **_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", **_SCALED, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
)


def changes_of(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a family's configuration and other values for them, in a fixed order."""
    text = tiny_config(name).get_text_config()
    out = []
    for field in dataclasses.fields(text):
        if field.name in _LEFT_OUT or field.name.endswith(("_token_id", "_token_index")):
            continue
        value = vars(text).get(field.name)  # others differ by layer
        out += [(field.name, other) for other in _others(field.name, value) if other != value]
    return out


def _others(name: str, value: Any) -> Iterator[Any]:
    if name == "rope_parameters":
        yield from _ropes(value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from sorted({0, 1, 2, 3, 2 * value, value // 2, value + 1})
    elif isinstance(value, float):
        yield from (0.0, 0.5 * value, 2.0 * value, 1.0)
    elif isinstance(value, str):
        yield from _WORDS.get(name, ())
    elif value is None:
        yield from (True, 1, 4, 8, 0.5, 2.5)
    elif isinstance(value, list) and value:
        for kind in sorted(set(value), key=str):
            yield [kind] * len(value)
        yield value[::-1]
        if name == "layer_types":
            yield ["full_attention", *["sliding_attention"] * (len(value) - 1)]


def _ropes(value: Any) -> Iterator[Any]:
    """Yield other parameters of a rotary embedding, or of one for each type of layers."""
    if not isinstance(value, dict):
        return
    by_type = all(isinstance(one, dict) for one in value.values())
    for rope in _ROPES:
        if by_type:
            yield {kind: {**one, **rope} for kind, one in value.items()}
            for kind, one in value.items():
                yield {**value, kind: {**one, **rope}}
        else:
            yield {**value, **rope}
