"""What is known of one family of models: where its experts are, and what its config.json says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cpumoe.checkpoints.architectures.layer_shapes import Config, Sizes, Vectors, grouped_attention, nothing
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
    """All experts in one tensor [experts, in, out], gate and up columns alternating (interleaved) or in two halves."""

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

    def __iter__(self) -> Iterator[str]:
        return iter((self.gate, self.up, self.down))


BY_FUNCTION = Projections("gate_proj", "up_proj", "down_proj")
BY_NUMBER = Projections("w1", "w3", "w2")


def every_layer(config: Config) -> list[int]:
    return list(range(config["num_hidden_layers"]))


def hidden_act(config: Config) -> Activation:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise CheckpointError(
            f"config.json has hidden_act={name!r:.80}, which is not served; {', '.join(ACTIVATION_NAMES)} are"
        )
    return Activation(ACTIVATION_NAMES[name], gated=True)  # all of these architectures have a gate


# Bounds far above any model: without them a config.json that lies makes us list all its layers and experts first.
_LARGEST_SIZE = 1 << 20
_MOST_EXPERTS = 1 << 18
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ExpertsFacts:
    """What a config.json says of the routed experts."""

    layers: tuple[int, ...]
    expert_count: int
    hidden_size: int
    intermediate_size: int
    topk: int
    activation: Activation


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    Names inside a layer are given as paths, first as transformers has them in memory, then as files may have them.
    ``experts_paths`` and ``router_paths`` are those of the routed experts and of what chooses among them.
    ``attention``, ``dense`` and ``shared`` give the sizes of the linears of every layer, of layers without experts, and
    beside the experts.
    """

    experts_paths: tuple[str, ...] = ("mlp.experts",)
    projections: tuple[Projections, ...] = (BY_FUNCTION,)
    fused: FusedLayout | None = None
    has_bias: bool = False
    intermediate_size_field: str = "moe_intermediate_size"
    layers: Callable[[Config], list[int]] = every_layer
    activation: Callable[[Config], Activation] = hidden_act
    topk_methods: tuple[str, ...] = ()  # what topk_method may be, where the family has it
    router_paths: tuple[str, ...] = ("mlp.gate",)
    router_biases: tuple[str, ...] = ()  # last parts of the names of what it adds to its scores
    shared_gates: tuple[str, ...] = ()  # paths of the linears that weigh the shared experts
    attention: Callable[[Config], Sizes] = grouped_attention
    attention_biases: AttentionBiases = AttentionBiases("attention_bias", ("q_proj", "k_proj", "v_proj", "o_proj"))
    attention_vectors: Callable[[Config], Vectors] = nothing  # what it has besides linears
    plain_attention: bool = True  # softmax over the keys and nothing else; gpt-oss adds a sink
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    dense: Callable[[Config], Sizes] = nothing
    shared: Callable[[Config], Sizes] = nothing

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Paths of linears that no tool quantises."""
        return self.router_paths + self.shared_gates

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

        if size("num_hidden_layers") * size(*_EXPERT_COUNT_FIELDS) > _MOST_EXPERTS:
            raise CheckpointError(f"config.json announces more than {_MOST_EXPERTS} experts")
        try:
            layers, activation = tuple(self.layers(config)), self.activation(config)
        except CheckpointError:
            raise
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
            raise CheckpointError(f"config.json does not say which layers have experts, and how: {problem}") from None
        expert_count, topk = size(*_EXPERT_COUNT_FIELDS), size("num_experts_per_tok")
        if self.topk_methods and config.get("topk_method", self.topk_methods[0]) not in self.topk_methods:
            accepted = " or ".join(self.topk_methods)
            raise CheckpointError(f"config.json has topk_method={config['topk_method']!r:.80}; {accepted} is accepted")
        _check_routing(config, expert_count, topk)
        intermediate_size = size(self.intermediate_size_field)
        return ExpertsFacts(layers, expert_count, size("hidden_size"), intermediate_size, topk, activation)


def _check_routing(config: Config, expert_count: int, topk: int) -> None:
    """Groups of experts are equal, and those that are chosen hold enough of them."""
    if topk > expert_count:
        raise CheckpointError(f"config.json has num_experts_per_tok={topk}; 1 to {expert_count} are accepted")
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if not isinstance(groups, int) or not isinstance(chosen, int):
        return
    if groups < 1 or expert_count % groups != 0:
        raise CheckpointError(f"config.json has n_group={groups}, which does not divide {expert_count} experts")
    if not 1 <= chosen <= groups:
        raise CheckpointError(f"config.json has topk_group={chosen}; 1 to {groups} are accepted")
    in_chosen = chosen * (expert_count // groups)
    if topk > in_chosen:
        text = f"num_experts_per_tok={topk}, n_group={groups} and topk_group={chosen}"
        raise CheckpointError(f"config.json has {text}: the chosen groups hold {in_chosen} experts")
