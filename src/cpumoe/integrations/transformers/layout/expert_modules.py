"""Experts of transformers models, found by what they are: sizes, orientation, biases and the activation between.

transformers marks its expert classes with ``use_experts_implementation``, which leaves attributes that say how the
weights lie. The activation is recognised by what it computes: a class may have any name for it.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.model_layout import ExpertsShape
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers import reference
from cpumoe.layers.activation import Activation

_log = logging.getLogger("cpumoe")

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
POST_EXPERT_NORM = "post_expert_norm"
_TOPK_NAMES = ("top_k", "num_experts_per_tok", "topk", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")


class Role(Enum):
    """What an experts module does besides weighing and adding the results of the experts that it is given ids of."""

    PLAIN = "nothing"
    NORMED = "each result goes through a norm before it is weighed"
    WITH_IDENTITIES = "ids behind the last expert stand for the token itself"
    WEIGHING_TOKENS = "the routing weight multiplies the token; the block around the experts is replaced as well"
    KEEPING_SEQUENCES = "tokens come and go as [batch, length, hidden]"
    ROUTING = "the module is the whole block, which routes by itself and adds a bias"


@dataclass(frozen=True)
class Marks:
    """What a class of experts says of its weights, or what is known of one that says nothing.

    Attributes:
        has_gate, has_bias, is_transposed, is_concatenated: as transformers has them.
        role: what it does besides.
        first, second: names of the parameters of both products; None for the usual ones. The first may be two, of gate
            and of up.
        is_flat: experts and their rows share the first dimension.
        act_fn: the name of its activation, where it has no ``_apply_gate``.
        arguments: how many it is called with.
    """

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    role: Role = Role.PLAIN
    first: tuple[str, ...] | None = None
    second: str = "down_proj"
    is_flat: bool = False
    act_fn: str = "act_fn"
    arguments: int = 3

    @property
    def first_names(self) -> tuple[str, ...]:
        return self.first or ("gate_up_proj" if self.has_gate else "up_proj",)


#: Classes that transformers does not mark.
UNMARKED = {
    "Step3p7Experts": Marks(),
    "LongcatFlashExperts": Marks(role=Role.WITH_IDENTITIES),
    "Llama4TextExperts": Marks(is_transposed=True, role=Role.WEIGHING_TOKENS, arguments=1),
    "DbrxExperts": Marks(
        role=Role.KEEPING_SEQUENCES,
        first=("mlp.w1", "mlp.v1"),
        second="mlp.w2",
        is_flat=True,
        act_fn="mlp.activation_fn",
    ),
    "JetMoeMoE": Marks(
        role=Role.ROUTING,
        first=("input_linear.weight",),
        second="output_linear.weight",
        act_fn="activation",
        arguments=1,
    ),
}

#: Parts of models that are experts too and stay in float, with what they are.
LEFT_IN_FLOAT = {"JetMoeMoA": "experts of the attention's query and output projections"}


@dataclass(frozen=True)
class ExpertsModule:
    """What a module with the routed experts of a layer has.

    Attributes:
        shape: its sizes and activation.
        marks: what its class says, with the names of its parameters: [E, 2 I, H] (or [E, I, H]) and [E, H, I] unless
            they are transposed or flat.
        first_bias, second_bias: names of the biases, or None.
    """

    shape: ExpertsShape
    marks: Marks
    first_bias: str | None
    second_bias: str | None

    @property
    def products(self) -> tuple[str, ...]:
        """Names of the parameters with the weights of both products."""
        return (*self.marks.first_names, self.marks.second)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that become packed."""
        return (*self.products, *(name for name in (self.first_bias, self.second_bias) if name is not None))

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows alternate."""
        return not self.marks.is_concatenated

    def matrices(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Both products' weights, [E, rows, columns] with one row for an output."""
        count, marks = self.shape.expert_count, self.marks
        *first, second = (module.get_parameter(name).detach() for name in self.products)
        if marks.is_flat:  # [E * I, H] each
            first, second = [part.unflatten(0, (count, -1)) for part in first], second.unflatten(0, (count, -1))
        elif marks.is_transposed:
            first = [part.transpose(1, 2) for part in first]
        turned = marks.is_flat or marks.is_transposed
        joined = first[0][:count] if len(first) == 1 else torch.cat(first, 1)
        return joined, second.transpose(1, 2) if turned else second

    def biases(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """[E, rows of the first product] and [E, H], or None."""
        names = (self.first_bias, self.second_bias)
        first, second = (None if name is None else module.get_parameter(name).detach() for name in names)
        return first, second


def marks_of(module: nn.Module) -> Marks | None:
    """What is known of a module with the routed experts of a layer; None for every other module."""
    if all(isinstance(getattr(module, mark, None), bool) for mark in _MARKS):
        role = Role.NORMED if getattr(module, "has_post_expert_norm", False) else Role.PLAIN
        return Marks(**{mark: getattr(module, mark) for mark in _MARKS}, role=role)
    return UNMARKED.get(type(module).__name__)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold routed experts in float, by name."""
    for name, module in model.named_modules():
        if marks_of(module) is not None:
            yield name, module
        elif type(module).__name__ in LEFT_IN_FLOAT:
            _warn_of_floats(type(module).__name__)


@cache
def _warn_of_floats(name: str) -> None:
    """Says once that experts of a class stay in float."""
    _log.warning("%s stays in float: %s", name, LEFT_IN_FLOAT[name])


def describe_experts(module: nn.Module) -> ExpertsModule:
    """What an experts module has; raises UnsupportedScheme with the reason if it is not served.

    Its weights may be on the meta device: only shapes are looked at, and the activation is called with numbers.
    """
    marks = marks_of(module)
    assert marks is not None  # the caller has looked
    biases = (f"{marks.first_names[0]}_bias", f"{marks.second}_bias") if marks.has_bias else (None, None)
    known = {name for name in (*marks.first_names, marks.second, *biases) if name is not None}
    if marks.role is not Role.ROUTING:
        for name, _ in module.named_parameters():
            if name not in known and not (marks.role is Role.NORMED and name.startswith(f"{POST_EXPERT_NORM}.")):
                raise not_served(module, f"has a parameter {name}, and only {', '.join(sorted(known))} are known")
    arguments = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    if len(arguments) != marks.arguments:
        raise not_served(module, f"is called with {', '.join(arguments)}; hidden states, ids and weights are known")
    count, hidden, inner = _sizes(module, marks)
    activation = recognise_activation(module, marks, inner)
    return ExpertsModule(ExpertsShape(count, hidden, inner, activation, marks.has_bias), marks, *biases)


def _sizes(module: nn.Module, marks: Marks) -> tuple[int, int, int]:
    """How many experts there are, their hidden size and their intermediate size, from the shapes of the weights."""
    *first, second = (tuple(module.get_parameter(name).shape) for name in (*marks.first_names, marks.second))
    if marks.is_flat:
        count = int(module.num_experts)  # type: ignore[arg-type]
        fits = {*first} == {second} and len(second) == 2 and second[0] % count == 0
        sizes = (count, second[1], second[0] // count)
    else:
        fits = len(second) == 3 and len(first[0]) == 3
        count, hidden, inner = second if fits else (0, 0, 0)
        sizes = (count, inner, hidden) if marks.is_transposed else (count, hidden, inner)
        rows = sizes[2] * (2 if marks.has_gate else 1)
        expected = (sizes[1], rows) if marks.is_transposed else (rows, sizes[1])
        fits = fits and first[0][1:] == expected
        fits = fits and (first[0][0] == count or marks.role is Role.WITH_IDENTITIES)
    if not fits or min(sizes) < 1:
        raise not_served(module, f"has weights of {', '.join(str(list(shape)) for shape in (*first, second))}")
    return sizes


def experts_per_token(model: nn.Module, name: str, expert_count: int) -> int:
    """How many experts a token goes to, as what lies beside the experts says; 1 if nothing does."""
    parent = model.get_submodule(name.rpartition(".")[0])
    places: list[Any] = [parent, *parent.children(), getattr(parent, "config", None)]
    places.append(getattr(model.get_submodule(name), "config", None))
    for place in places:
        for attribute in _TOPK_NAMES:
            value = getattr(place, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= expert_count:
                return value
    return 1


def not_served(module: nn.Module, reason: str) -> UnsupportedScheme:
    return UnsupportedScheme(
        f"{type(module).__name__} {reason}, so these experts are not served; experts_implementation='eager' runs them "
        "in float"
    )


# ---- activations ---------------------------------------------------------------------------------------------------

_PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
_PROBES = 96
_FAR = 1e4  # beyond any limit
_TOLERANCE = 2e-6  # relative, of each value: gelu and its tanh form differ by 30 times that
_FAR_PROBES = (-_FAR, -1e3, -100.0, -30.0, 30.0, 100.0, 1e3, _FAR)


def recognise_activation(module: nn.Module, marks: Marks, inner: int) -> Activation:
    """The activation between an experts module's products, by comparing what it computes with what we have."""
    kind: Any = module
    function: Any = _attribute(module, marks.act_fn)

    def computed(gate: Tensor, up: Tensor | None) -> Tensor:  # [tokens] each -> [tokens]
        def column(values: Tensor) -> Tensor:
            return values.unsqueeze(1).expand(-1, inner)

        if up is None:
            alone: Tensor = function(column(gate))[:, 0]
            return alone
        if not hasattr(kind, "_apply_gate"):
            times_up: Tensor = (function(column(gate)) * column(up))[:, 0]
            return times_up
        both = (column(gate), column(up))
        joined = torch.cat(both, 1) if marks.is_concatenated else torch.stack(both, 2).flatten(1)
        return kind._apply_gate(joined)[:, 0]  # type: ignore[no-any-return]

    activation = _recognised(computed, marks.has_gate)
    if activation is None:
        raise not_served(
            module,
            f"has an activation ({type(function).__name__}) that is none of {', '.join(_PLAIN)}, swiglu_oai, "
            "swiglu_step",
        )
    return activation


def recognise_function(function: Callable[[Tensor], Tensor], gated: bool) -> Activation | None:
    """The activation that a function, or a function times another product, is; None if it is none of ours."""

    def computed(gate: Tensor, up: Tensor | None) -> Tensor:
        return function(gate) if up is None else function(gate) * up

    return _recognised(computed, gated)


def _recognised(computed: Callable[[Tensor, Tensor | None], Tensor], gated: bool) -> Activation | None:
    """Of our activations the one that gives what ``computed`` gives of [tokens] gates and ups."""
    generator = torch.Generator().manual_seed(11)
    near = [torch.randn(_PROBES, generator=generator, dtype=torch.float64) * 8 for _ in range(2)]
    far = torch.tensor(_FAR_PROBES, dtype=torch.float64)
    usual = torch.full_like(far, 1.5)
    gate = torch.cat((near[0], far, usual))  # limits may be anywhere: each alone goes far
    up = torch.cat((near[1], usual, far)) if gated else None
    with torch.no_grad():
        truth = computed(gate, up)
        candidates = list(_candidates(None if up is None else computed))
    rows = gate.unsqueeze(1) if up is None else torch.stack((gate, up), 1)  # [tokens, 2]: one gate and one up column
    for activation in candidates:
        ours = reference.apply_activation(rows, activation)[:, 0]
        if torch.allclose(ours, truth, rtol=_TOLERANCE, atol=1e-9):
            return activation
    return None


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _candidates(gated: Callable[[Tensor, Tensor | None], Tensor] | None) -> Iterator[Activation]:
    """Activations that a module may have: the plain ones, and those with limits, which are measured."""
    for name in _PLAIN:
        yield Activation(name, gated=gated is not None)
    if gated is None:
        return

    def at(gate: float, up: float) -> float:
        return float(gated(*(torch.tensor([value], dtype=torch.float64) for value in (gate, up))))

    def limit(measured: float) -> float:  # numbers in a configuration have few digits
        return float(f"{measured:.7g}") if 0 < measured < _FAR / 2 else math.inf

    near = 1e-3  # within any limit
    if unlimited := at(1, near):  # silu(gate) * up, both bounded; 0 if a bound is 0
        most, up_limit = at(_FAR, near) / near, at(1, _FAR) * near / unlimited
        yield Activation("swiglu_step", gate_limit=limit(most), limit=limit(up_limit))
    share = at(near, 0) / near  # gate * sigmoid(alpha * gate) * (up + 1)
    if 0 < share < 1:
        alpha = float(f"{math.log(share / (1 - share)) / near:.7g}")
        yield Activation("swiglu_oai", alpha=alpha, limit=limit(at(near, _FAR) / at(near, 0) - 1))
