"""Sizes of what a layer has besides experts, from the fields of config.json.

Families are rows of ``families.py``. A field that config.json leaves out has a default that only transformers knows;
sizes that need it are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Sizes = dict[str, tuple[int, int]]  # path of a linear inside a layer -> rows, columns
Vectors = dict[str, int | None]  # path of a tensor inside a layer -> its elements; None where config.json does not say


def _known(config: Config, *names: str) -> list[int] | None:
    values = [config.get(name) for name in names]
    integers = [value for value in values if isinstance(value, int)]
    return integers if len(integers) == len(names) else None


def _head_size(config: Config) -> int | None:
    needed = _known(config, "hidden_size", "num_attention_heads")
    return config.get("head_dim") or (None if needed is None else needed[0] // needed[1])


def grouped_attention(config: Config) -> Sizes:
    """Queries, and fewer keys and values."""
    needed = _known(config, "hidden_size", "num_attention_heads", "num_key_value_heads")
    if needed is None:
        return {}
    hidden, heads, key_heads = needed
    depth = _head_size(config)
    assert depth is not None  # it follows from what is needed
    rows = {"q_proj": heads * depth, "k_proj": key_heads * depth, "v_proj": key_heads * depth}
    sizes = {f"self_attn.{name}": (count, hidden) for name, count in rows.items()}
    return sizes | {"self_attn.o_proj": (hidden, heads * depth)}


def grouped_attention_with_stated_depth(config: Config) -> Sizes:
    """The same for families whose head_dim does not follow from the other sizes."""
    return grouped_attention(config) if "head_dim" in config else {}


def latent_attention(config: Config) -> Sizes:
    """DeepSeek's: keys and values, and usually queries, go through a narrow latent."""
    names = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    needed = _known(config, *names)
    if needed is None or "q_lora_rank" not in config:
        return {}
    hidden, heads, latent, unrotated, rotated, value = needed
    sizes = {
        "self_attn.kv_a_proj_with_mqa": (latent + rotated, hidden),
        "self_attn.kv_b_proj": (heads * (unrotated + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }
    rank, queries = config["q_lora_rank"], heads * (unrotated + rotated)
    if rank is None:
        return sizes | {"self_attn.q_proj": (queries, hidden)}
    return sizes | {"self_attn.q_a_proj": (rank, hidden), "self_attn.q_b_proj": (queries, rank)}


def gated_mlp(path: str, *names: str) -> Callable[[Config], Sizes]:
    """Gate, up and down at ``path``; their inner size is the product of the fields ``names``."""

    def sizes(config: Config) -> Sizes:
        needed = _known(config, "hidden_size", *names)
        if needed is None:
            return {}
        hidden, *factors = needed
        inner = 1
        for factor in factors:
            inner *= factor
        rows = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {f"{path}.{name}": size for name, size in rows.items()}

    return sizes


def nothing(_: Config) -> dict[str, Any]:
    return {}


def head_norms(config: Config) -> Vectors:
    """Queries and keys are normalised head by head."""
    return dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), _head_size(config))


def head_norms_if_chosen(config: Config) -> Vectors:
    return head_norms(config) if config.get("use_qk_norm") is True else {}


def whole_norms(config: Config) -> Vectors:
    """The queries of all heads are normalised together, and so are the keys."""
    sizes = grouped_attention(config)
    return {
        f"self_attn.{norm}.weight": sizes[linear][0] if (linear := f"self_attn.{of}") in sizes else None
        for norm, of in (("q_norm", "q_proj"), ("k_norm", "k_proj"))
    }


def latent_norms(config: Config) -> Vectors:
    """The latents of DeepSeek's attention are normalised."""
    vectors: Vectors = {"self_attn.kv_a_layernorm.weight": config.get("kv_lora_rank")}
    if (rank := config.get("q_lora_rank")) is not None:
        vectors["self_attn.q_a_layernorm.weight"] = rank
    return vectors


def sinks(config: Config) -> Vectors:
    """A learned logit per head, beside those of the keys."""
    return {"self_attn.sinks": config.get("num_attention_heads")}
