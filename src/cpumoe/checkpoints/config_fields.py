"""Fields of config.json that every model has: values that no model can have are refused by their names.

transformers builds a model of whatever the fields say, and what comes of a size of 0, of Infinity or of 10**18 is an
exception from somewhere inside, or a wait without an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from cpumoe.errors import CheckpointError

_LARGEST = 2**31 - 1

#: Sizes and counts with the least that is accepted. null stands for "not said" wherever transformers has a default.
_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 0,
    "max_position_embeddings": 1,
    "intermediate_size": 0,
    "intermediate_size_mlp": 0,
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "num_experts_per_tok": 1,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 1,
    "q_lora_rank": 1,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 1,
    "sliding_window": 0,
}

#: Numbers that enter the arithmetic: finite, and above the first or at least the second.
_POSITIVE = ("rope_theta",)
_NOT_NEGATIVE = ("rms_norm_eps", "attention_dropout")
_FINITE = ("routed_scaling_factor", "swiglu_alpha", "swiglu_limit")

_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_cache")


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for the first field whose value cannot be meant.

    Args:
        config: the part of config.json that describes the language model.
    """
    for name, least in _LEAST.items():
        _check_integer(config, name, least, _LARGEST)
    _check_numbers(config)
    rotation = config.get("rope_parameters")
    if isinstance(rotation, Mapping):  # for all layers, or for each kind of layer
        for part in (rotation, *rotation.values()):
            if isinstance(part, Mapping):
                _check_numbers(part)
    for name in _SWITCHES:
        if not isinstance(config.get(name), bool | None):
            raise CheckpointError(f"config.json has {name}={config[name]!r:.80}; true or false is accepted")
    _check_routing(config)
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int):
        _check_integer(config, "pad_token_id", -vocabulary, vocabulary - 1)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _check_routing(config: Mapping[str, Any]) -> None:
    """A token goes to some of the experts; groups of them are equal, and those that are chosen hold enough."""
    count = next((config[name] for name in _EXPERT_COUNTS if isinstance(config.get(name), int)), None)
    topk = config.get("num_experts_per_tok")
    if count is None or not isinstance(topk, int):
        return
    if topk > count > 0:
        raise CheckpointError(f"config.json has num_experts_per_tok={topk}; 1 to {count} are accepted")
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if not isinstance(groups, int) or not isinstance(chosen, int):
        return
    if count % groups != 0:
        raise CheckpointError(f"config.json has n_group={groups}, which does not divide {count} experts")
    if chosen > groups:
        raise CheckpointError(f"config.json has topk_group={chosen}; 1 to {groups} are accepted")
    in_chosen = chosen * (count // groups)
    if topk > in_chosen:
        text = f"num_experts_per_tok={topk}, n_group={groups} and topk_group={chosen}"
        raise CheckpointError(f"config.json has {text}: the chosen groups hold {in_chosen} experts")


def _check_numbers(config: Mapping[str, Any]) -> None:
    for name in (*_POSITIVE, *_NOT_NEGATIVE, *_FINITE):
        value = config.get(name)
        if value is None:
            continue
        accepted = "a finite number"
        fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if fits and name in _POSITIVE:
            fits, accepted = value > 0, "a number above 0"
        elif fits and name in _NOT_NEGATIVE:
            fits, accepted = value >= 0, "a number from 0 on"
        if not fits:
            raise CheckpointError(f"config.json has {name}={value!r:.80}; {accepted} is accepted")


def _check_integer(config: Mapping[str, Any], name: str, least: int, most: int) -> None:
    value = config.get(name)
    if isinstance(value, list):  # one for each group of experts, or for each layer; transformers knows which may be
        return
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
        raise CheckpointError(f"config.json has {name}={value!r:.80}; {least} to {most} are accepted")
