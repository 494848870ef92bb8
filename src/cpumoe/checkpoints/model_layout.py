"""What a model consists of and where its files have it: routed experts, linears, and all other tensors.

These are values. The transformers plug-in makes them from a model and the names in its files; readers, the quantiser,
inspection and checks work from them, and no one asks for a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.layers.activation import Activation


@dataclass(frozen=True)
class ExpertsShape:
    """The routed experts of one layer: how many, how large, and what is between their products."""

    expert_count: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    has_bias: bool = False

    @property
    def gate_up_rows(self) -> int:
        return self.activation.gate_up_rows(self.intermediate_size)


@dataclass(frozen=True)
class FusedMatrix:
    """A matrix of all experts, [experts, out, in], as files have it: in one tensor, or gate and up in two.

    Attributes:
        tensors: the one, or those of gate and of up.
        transposed: the tensor is [experts, in, out].
        interleaved: gate and up rows alternate; otherwise all gate rows come first.
        flat: the first two dimensions are one, [experts * out, in] or [experts * in, out].
        biases: likewise for [experts, out]; none if there are no biases.
    """

    tensors: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusedExperts:
    """Where files have experts of which each matrix is one tensor."""

    gate_up: FusedMatrix
    down: FusedMatrix


@dataclass(frozen=True)
class ExpertsLayout:
    """The routed experts of one module of a model, and where they are in files.

    Attributes:
        module: name in the model, such as ``model.layers.0.mlp.experts``.
        prefix: what messages call them: the part of their names in the files that they share.
        shape: what they are.
        linears: for each expert the names of its linears in the files, gate, up and down, or up and down where there is
            no gate. If the files have all experts in one tensor, the names that quantised files give them.
        fused: where files have all experts in one tensor; None if each has linears of its own.
        per_token: how many experts a token goes to.
    """

    module: str
    prefix: str
    shape: ExpertsShape
    linears: tuple[tuple[str, ...], ...]
    fused: FusedExperts | None = None
    per_token: int = 1

    @property
    def stored(self) -> object:
        """Where the weights are: the same for modules that share their experts."""
        return self.linears if self.fused is None else self.fused


@dataclass(frozen=True)
class LinearPlace:
    """A linear of the model that is not an expert.

    Attributes:
        module: name in the model.
        source: the stored tensor of its weight in a float checkpoint: that of another module if they are tied.
        may_be_packed: whether one that is in float may be quantised on request. Routers may not, nor linears outside of
            the language model, nor those whose weight the model's code takes without calling them.
    """

    module: str
    rows: int
    columns: int
    has_bias: bool
    source: str
    is_tied: bool
    may_be_packed: bool


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the model that is neither of experts nor of linears.

    ``shape``: as the files must have it, or None where transformers makes the model's tensor of it by a converter.
    """

    target: str
    shape: tuple[int, ...] | None
    is_float: bool


@dataclass(frozen=True)
class ModelLayout:
    """All tensors of a model in the files of a checkpoint.

    Attributes:
        model_type, layer_count, hidden_size: of the language model.
        experts: the routed experts, in the order of the layers.
        linears: linears that are not experts, by their names in the files.
        tensors: every other tensor that the model has, by its name in the files.
        routers: names in the files of tensors that choose or weigh experts.
        left_out: tensors of the files that are rightly not loaded: of parts that this model does not have.
        unexpected: tensors of the files for which the model has no place at all.
        kv_cache_scales: those that were calibrated for a quantised KV cache, which are checked and not loaded.
        of_experts: tensors of the files that belong to routed experts, whether they should be there or not -> the
            module whose they are, the first one where several share them.
    """

    model_type: str
    layer_count: int | None
    hidden_size: int | None
    experts: tuple[ExpertsLayout, ...]
    linears: Mapping[str, LinearPlace]
    tensors: Mapping[str, TensorPlace]
    routers: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    unexpected: tuple[str, ...] = ()
    of_experts: Mapping[str, str] = field(default_factory=dict)
    kv_cache_scales: Mapping[str, StoredTensor] = field(default_factory=dict)


#: Describes a checkpoint. Those who have transformers hand it to those who work without.
Describe = Callable[[Checkpoint], ModelLayout]
