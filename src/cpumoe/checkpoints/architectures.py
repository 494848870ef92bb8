"""Architectures: where the experts of a model are, in memory and on disk, and what its config.json says of them.

One row per family. Everything that differs from one architecture to the next is a value here; the reader, the
quantiser and the plug-ins ask this table and no one asks for a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpumoe.checkpoints.layer_shapes import (
    Config,
    Sizes,
    gated_mlp,
    grouped_attention,
    grouped_attention_of_told_depth,
    latent_attention,
    nothing,
)
from cpumoe.errors import CheckpointError
from cpumoe.layers.activation import Activation

#: transformers' names of activation functions -> ours.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class FusedLayout:
    """All experts in one tensor [experts, in, out], gate and up columns in turn (interleaved) or one after another."""

    interleaved: bool


@dataclass(frozen=True)
class AttentionBiases:
    """Which linears of the attention have a bias if config.json says so, and where it says that."""

    field: str
    linears: tuple[str, ...]


@dataclass(frozen=True)
class Projections:
    """Names of an expert's three linears."""

    gate: str
    up: str
    down: str

    def __iter__(self) -> Any:
        return iter((self.gate, self.up, self.down))


_BY_FUNCTION = Projections("gate_proj", "up_proj", "down_proj")
_BY_NUMBER = Projections("w1", "w3", "w2")


def _every_layer(config: Config) -> list[int]:
    return list(range(config["num_hidden_layers"]))


def _qwen_layers(config: Config) -> list[int]:
    dense, step = set(config.get("mlp_only_layers") or []), config.get("decoder_sparse_step", 1)
    return [i for i in _every_layer(config) if i not in dense and (i + 1) % step == 0]


def _after_dense_layers(config: Config) -> list[int]:
    dense = config.get("first_k_dense_replace") or 0
    return [i for i in _every_layer(config) if i >= dense]


def _llama4_layers(config: Config) -> list[int]:
    if (listed := config.get("moe_layers")) is not None:
        return [i for i in _every_layer(config) if i in set(listed)]
    step = config.get("interleave_moe_layer_step", 1)
    return list(range(step - 1, config["num_hidden_layers"], step))


def _hidden_act(config: Config) -> Activation:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise CheckpointError(
            f"config.json has hidden_act={name!r:.80}, which is not served; {', '.join(ACTIVATION_NAMES)} are"
        )
    return Activation(ACTIVATION_NAMES[name], gated=True)  # all of these architectures have a gate


def _swiglu_oai(config: Config) -> Activation:
    return Activation("swiglu_oai", alpha=config.get("swiglu_alpha", 1.702), limit=config.get("swiglu_limit", 7.0))


# Bounds far above any model: without them a lying config.json makes a list of all its layers and experts first.
_LARGEST_SIZE = 1 << 20
_MOST_EXPERTS = 1 << 18
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ExpertsFacts:
    """What a config.json says of the routed experts."""

    layers: tuple[int, ...]
    experts: int
    hidden_size: int
    intermediate_size: int
    topk: int
    activation: Activation


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    ``experts`` is the path of the experts inside a layer, first as transformers has it in memory, then as files may
    have it. ``routers`` are linears that no tool quantises. ``attention``, ``dense`` and ``shared`` give the sizes of
    the linears of every layer, of layers without experts, and beside the experts.
    """

    experts: tuple[str, ...] = ("mlp.experts",)
    projections: tuple[Projections, ...] = (_BY_FUNCTION,)
    fused: FusedLayout | None = None
    has_bias: bool = False
    intermediate: str = "moe_intermediate_size"
    layers: Callable[[Config], list[int]] = _every_layer
    activation: Callable[[Config], Activation] = _hidden_act
    routers: tuple[str, ...] = ("mlp.gate",)
    plain_attention: bool = True  # softmax over the keys and nothing else; gpt-oss adds a sink
    attention: Callable[[Config], Sizes] = grouped_attention
    topk_methods: tuple[str, ...] = ()  # what topk_method may be, where the family has it
    biases: AttentionBiases = AttentionBiases("attention_bias", ("q_proj", "k_proj", "v_proj", "o_proj"))
    dense: Callable[[Config], Sizes] = nothing
    shared: Callable[[Config], Sizes] = nothing

    def facts(self, config: Config) -> ExpertsFacts:
        """Reads the sizes from a config.json (the part of it that describes the language model)."""

        def size(*names: str) -> int:
            for name in names:
                value = config.get(name)
                if value is not None:
                    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_SIZE:
                        raise CheckpointError(
                            f"config.json has {name}={value!r:.80}; 1 to {_LARGEST_SIZE} are accepted"
                        )
                    return value
            raise CheckpointError(f"config.json has no {' or '.join(names)}")

        if size("num_hidden_layers") * size(*_NAMES_OF_EXPERTS) > _MOST_EXPERTS:
            raise CheckpointError(f"config.json announces more than {_MOST_EXPERTS} experts")
        try:
            layers, activation = tuple(self.layers(config)), self.activation(config)
        except CheckpointError:
            raise
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
            raise CheckpointError(f"config.json does not say which layers have experts, and how: {problem}") from None
        experts, topk = size(*_NAMES_OF_EXPERTS), size("num_experts_per_tok")
        if self.topk_methods and config.get("topk_method", self.topk_methods[0]) not in self.topk_methods:
            accepted = " or ".join(self.topk_methods)
            raise CheckpointError(f"config.json has topk_method={config['topk_method']!r:.80}; {accepted} is accepted")
        _check_routing(config, experts, topk)
        return ExpertsFacts(layers, experts, size("hidden_size"), size(self.intermediate), topk, activation)


def _check_routing(config: Config, experts: int, topk: int) -> None:
    """Groups of experts are equal, and those that are chosen hold enough of them."""
    if topk > experts:
        raise CheckpointError(f"config.json has num_experts_per_tok={topk}; 1 to {experts} are accepted")
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if not isinstance(groups, int) or not isinstance(chosen, int):
        return
    if groups < 1 or experts % groups != 0:
        raise CheckpointError(f"config.json has n_group={groups}, which does not divide {experts} experts")
    if not 1 <= chosen <= groups:
        raise CheckpointError(f"config.json has topk_group={chosen}; 1 to {groups} are accepted")
    if topk > chosen * (experts // groups):
        text = f"num_experts_per_tok={topk}, n_group={groups} and topk_group={chosen}"
        raise CheckpointError(f"config.json has {text}: the chosen groups hold {chosen * (experts // groups)} experts")


_QWEN3 = Architecture(
    layers=_qwen_layers,
    routers=("mlp.gate", "mlp.shared_expert_gate"),
    dense=gated_mlp("mlp", "intermediate_size"),
)
_QWEN2 = replace(
    _QWEN3,
    biases=AttentionBiases("qkv_bias", ("q_proj", "k_proj", "v_proj")),
    shared=gated_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
)
_GLM = Architecture(
    layers=_after_dense_layers,
    biases=AttentionBiases("attention_bias", ("q_proj", "k_proj", "v_proj")),
    dense=gated_mlp("mlp", "intermediate_size"),
    shared=gated_mlp("mlp.shared_experts", "moe_intermediate_size", "n_shared_experts"),
)
_DEEPSEEK = replace(
    _GLM,
    attention=latent_attention,
    biases=AttentionBiases("attention_bias", ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")),
)
_LLAMA4 = Architecture(
    experts=("feed_forward.experts",),
    fused=FusedLayout(interleaved=False),
    intermediate="intermediate_size",
    layers=_llama4_layers,
    routers=("feed_forward.router",),
    attention=grouped_attention_of_told_depth,
    dense=gated_mlp("feed_forward", "intermediate_size_mlp"),
    shared=gated_mlp("feed_forward.shared_expert", "intermediate_size"),
)

#: ``model_type`` of a config.json -> its family.
ARCHITECTURES: dict[str, Architecture] = {
    "qwen2_moe": _QWEN2,
    "qwen3_moe": _QWEN3,
    "olmoe": Architecture(intermediate="intermediate_size"),
    "deepseek_v2": replace(_DEEPSEEK, topk_methods=("greedy", "group_limited_greedy")),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _GLM,
    "mixtral": Architecture(
        experts=("mlp.experts", "block_sparse_moe.experts"),
        projections=(_BY_FUNCTION, _BY_NUMBER),
        intermediate="intermediate_size",
        routers=("mlp.gate", "block_sparse_moe.gate"),
        biases=AttentionBiases("", ()),
    ),
    "gpt_oss": Architecture(
        fused=FusedLayout(interleaved=True),
        has_bias=True,
        intermediate="intermediate_size",
        activation=_swiglu_oai,
        routers=("mlp.router",),
        plain_attention=False,
        attention=grouped_attention_of_told_depth,
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
}


def architecture_of(config: Config) -> Architecture:
    """The family of a config.json; raises CheckpointError with the list of those that are known."""
    architecture = known_architecture(config)
    if architecture is None:
        model_type = text_config(config).get("model_type")
        raise CheckpointError(f"model_type {model_type!r:.80} is not known; known are {', '.join(ARCHITECTURES)}")
    return architecture


def known_architecture(config: Config) -> Architecture | None:
    """The family of a config.json, or None; a multimodal model has that of its language model."""
    model_type = text_config(config).get("model_type")
    return ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None


def text_config(config: Config) -> Config:
    """The part of a config.json that describes the language model (multimodal models nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
