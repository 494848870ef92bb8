"""Backends: who serves what, and why not.

A backend answers questions about a :class:`~cpumoe.MoEConfig` with a reason when the answer is no, prepares
tensors from quantised experts, and computes with them. The first that says yes, in the order of ``BACKENDS``, is taken;
one that the user names is taken or refused, never replaced.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpumoe import cpu, ops, settings
from cpumoe.errors import NoBackend
from cpumoe.layers import reference
from cpumoe.layers.activation import KINDS, Activation
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.nibbles import pack_nibbles
from cpumoe.layers.packed_weights import ExpertsPacker, unpack_weight
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.routing_methods import RoutingMethod
from cpumoe.layers.scheme import PER_TOKEN_INT8, SCHEMES, Scheme
from cpumoe.layers.weight_checks import check_input_scales, check_values

_log = logging.getLogger("cpumoe")


class ExpertsCall(NamedTuple):
    """The arguments of :meth:`cpumoe.Experts.forward`."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    apply_router_weight_on_input: bool = False
    fp32_out: bool = False

    def check(self, config: MoEConfig) -> None:
        """Make the checks of the native operator, for the backends that do not call it."""
        hidden_states, topk_ids, topk_weights = self[:3]
        for name, tensor in zip(self._fields, self[:3], strict=False):
            if tensor.dim() != 2:
                raise ValueError(f"{name} has {tensor.dim()} dimensions; 2 are accepted")
        if hidden_states.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"hidden_states is {hidden_states.dtype}; float32, bfloat16 or float16 is accepted")
        if hidden_states.shape[1] != config.hidden_size:
            raise ValueError(
                f"hidden_states have {hidden_states.shape[1]} features, but gate_up takes {config.hidden_size}"
            )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids is {topk_ids.dtype}; int32 or int64 is accepted")
        if topk_ids.shape[0] != hidden_states.shape[0]:
            raise ValueError(
                f"topk_ids {list(topk_ids.shape)} do not have the {hidden_states.shape[0]} rows of hidden_states"
            )
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"topk_weights {list(topk_weights.shape)} and topk_ids {list(topk_ids.shape)} differ in shape"
            )
        if not topk_weights.is_floating_point():
            raise ValueError(f"topk_weights are {topk_weights.dtype}; a floating point dtype is accepted")
        outside = (topk_ids < -1) | (topk_ids >= config.local_experts)
        if bool(outside.any()):
            token, slot = outside.nonzero()[0].tolist()
            raise ValueError(
                f"topk_ids[{token}, {slot}]={int(topk_ids[token, slot])}; 0 to {config.local_experts - 1} are experts "
                "and -1 means none"
            )


class Backend(ABC):
    """One way to compute a layer. ``obstacle`` gives the first reason against it, or None."""

    name: str

    def obstacle(self, config: MoEConfig) -> str | None:
        if config.device != "cpu":
            return f"device {config.device!r}; only 'cpu' is served"
        if (reason := self.scheme_obstacle(config)) is not None:
            return reason
        if config.routing is RoutingMethod.UNSPECIFIED:
            return "routing method 'unspecified'; name a method of RoutingMethod"
        if not config.logits_dtype.is_floating_point:
            return f"router logits of {config.logits_dtype}; a floating point dtype is served"
        if not config.expert_map:
            return None
        return "expert_map=True; map the ids before the call (-1 for experts of other ranks) and leave expert_map False"

    def scheme_obstacle(self, config: MoEConfig) -> str | None:
        return None

    @abstractmethod
    def prepare(self, chunks: Iterable[QuantizedExperts], config: MoEConfig) -> dict[str, Tensor]:
        """The tensors that ``forward`` needs; they become the buffers of Experts.

        The experts come in order, a few at a time, and a chunk is done with when the next is asked for.
        """

    def quantized(
        self, tensors: Mapping[str, Tensor], config: MoEConfig, first: int, count: int | None
    ) -> QuantizedExperts:
        """Integers and scales of some experts, plain, from the tensors of ``prepare``."""
        raise NoBackend(f"weights that were prepared for {self.name!r} cannot be read back")

    @abstractmethod
    def forward(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        """[tokens, H] -> [tokens, H] of the same dtype, or with ``fp32_out`` the sums in fp32."""


class NativeBackend(Backend):
    """This project's kernels."""

    name = "native"

    def prepare(self, chunks: Iterable[QuantizedExperts], config: MoEConfig) -> dict[str, Tensor]:
        packer = ExpertsPacker(config)
        first = 0
        for chunk in chunks:
            packer.put(first, chunk)
            first += chunk.count
        return packer.finish()

    def quantized(
        self, tensors: Mapping[str, Tensor], config: MoEConfig, first: int, count: int | None
    ) -> QuantizedExperts:
        return QuantizedExperts(
            unpack_weight(tensors["gate_up_packed"], first, count, config.scheme),
            unpack_weight(tensors["down_packed"], first, count, config.scheme),
        )

    def forward(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        hidden_states, topk_ids, topk_weights, on_input, fp32_out = call
        return ops.fused_experts(
            hidden_states,
            topk_ids,
            topk_weights,
            tensors["gate_up_packed"],
            tensors["down_packed"],
            *config.activation.arguments,
            on_input,
            fp32_out,
        )


class _PlainBackend(Backend):
    """A backend in PyTorch, which holds all experts of a layer in one tensor."""

    def prepare(self, chunks: Iterable[QuantizedExperts], config: MoEConfig) -> dict[str, Tensor]:
        parts = []
        for chunk in chunks:
            for name, weight in (("gate_up", chunk.gate_up), ("down", chunk.down)):
                check_values(name, weight, config.scheme)
                check_input_scales(f"{name}_input_scale", weight.input_scales, config.scheme, (chunk.count,))
            parts.append(chunk.plain().copy())
        return self._prepare(QuantizedExperts.joined(parts), config)

    @abstractmethod
    def _prepare(self, plain: QuantizedExperts, config: MoEConfig) -> dict[str, Tensor]:
        """Return the tensors that ``_sums`` needs."""

    def forward(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        call.check(config)
        out = self._sums(tensors, config, call)
        return out if call.fp32_out else out.to(call.hidden_states.dtype)

    @abstractmethod
    def _sums(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        """Compute a layer: [tokens, H] in fp32."""


class AtenBackend(_PlainBackend):
    """PyTorch's own 4-bit product: KleidiAI on Arm, a plain loop elsewhere. One product per expert."""

    name = "aten"

    def scheme_obstacle(self, config: MoEConfig) -> str | None:
        weights = config.scheme.weights
        if weights.element != "int4" or not weights.symmetric or config.scheme.product_activations != PER_TOKEN_INT8:
            return f"scheme {config.scheme}; PyTorch's product has symmetric int4 weights and int8 activations only"
        if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
            return f"PyTorch {torch.__version__} has no _dyn_quant_matmul_4bit"
        wanted = torch.float32 if config.scheme.group_size is None else torch.bfloat16
        if config.scale_dtype != wanted:
            return f"{config.scale_dtype} scales; for {config.scheme} PyTorch's product takes {wanted}"
        return None

    def _prepare(self, plain: QuantizedExperts, config: MoEConfig) -> dict[str, Tensor]:
        if plain.gate_up.input_order is not None or plain.down.input_order is not None:
            raise NoBackend("weights in activation order; PyTorch's product has them in the order of the inputs only")
        return {
            "gate_up_packed": self._pack(plain.gate_up, config),
            "down_packed": self._pack(plain.down, config),
        }

    def _pack(self, weight: QuantizedWeight, config: MoEConfig) -> Tensor:
        values, scales, bias = weight.values, weight.scales, weight.bias
        rows, columns = values.shape[1:]
        group = config.scheme.group_size or columns
        return torch.stack(
            [
                torch.ops.aten._dyn_quant_pack_4bit_weight(
                    pack_nibbles(values[e]).contiguous(),
                    scales[e].contiguous(),
                    None if bias is None else bias[e].to(torch.float32).contiguous(),
                    group,
                    columns,
                    rows,
                )
                for e in range(values.shape[0])
            ]
        )

    def _sums(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = config.activation.gate_up_rows(inner)
        group = config.scheme.group_size

        def product(a: Tensor, weight: Tensor, inputs: int, outputs: int) -> Tensor:
            value = torch.ops.aten._dyn_quant_matmul_4bit(a.contiguous(), weight, group or inputs, inputs, outputs)
            # It gives finite garbage for a row with a NaN or an infinity.
            return torch.where(torch.isfinite(a).all(-1, keepdim=True), value, torch.nan)

        def expert(index: int, inputs: Tensor) -> Tensor:
            h = product(inputs, tensors["gate_up_packed"][index], hidden, rows)
            h = reference.apply_activation(h, config.activation)
            return product(h, tensors["down_packed"][index], inner, hidden)

        # fp32 whatever came in: grouped products exist for it alone.
        x = call.hidden_states.to(torch.float32)
        return reference.sum_of_experts(x, call.topk_ids, call.topk_weights, expert, call.apply_router_weight_on_input)


class ReferenceBackend(_PlainBackend):
    """Plain PyTorch; slow, and it keeps a byte per weight at least. Activations of weight-only schemes stay floats."""

    name = "reference"

    def _prepare(self, plain: QuantizedExperts, config: MoEConfig) -> dict[str, Tensor]:
        return {
            f"{name}_{part}": tensor
            for name, weight in (("gate_up", plain.gate_up), ("down", plain.down))
            for part in _PARTS
            if (tensor := getattr(weight, part)) is not None
        }

    def quantized(
        self, tensors: Mapping[str, Tensor], config: MoEConfig, first: int, count: int | None
    ) -> QuantizedExperts:
        end = config.local_experts if count is None else first + count

        def weight(name: str) -> QuantizedWeight:
            parts: dict[str, Any] = {part: tensors.get(f"{name}_{part}") for part in _PARTS}
            return QuantizedWeight(config.scheme.weights.element, **parts)[first:end]

        return QuantizedExperts(weight("gate_up"), weight("down"))

    def _sums(self, tensors: Mapping[str, Tensor], config: MoEConfig, call: ExpertsCall) -> Tensor:
        return reference.experts(
            *call[:3],
            lambda index: reference.dense_expert(self.quantized(tensors, config, index, 1)),
            config.activation,
            form=config.scheme.product_activations,
            apply_router_weight_on_input=call.apply_router_weight_on_input,
        )


_PARTS = tuple(f.name for f in fields(QuantizedWeight) if f.name != "element")

BACKENDS: tuple[Backend, ...] = (NativeBackend(), AtenBackend(), ReferenceBackend())

_AUTO = "auto"  # the name that stands for the choice among them


@dataclass(frozen=True)
class Verdict:
    """One backend's answer: None, or the reason against it."""

    backend: str
    obstacle: str | None


def explain(config: MoEConfig) -> list[Verdict]:
    """What every backend says of a layer, in the order of preference."""
    return [Verdict(backend.name, backend.obstacle(config)) for backend in BACKENDS]


@dataclass(frozen=True)
class Cell:
    """One kind of layer on one instruction set, and the backend that serves it; None if none does."""

    scheme: str
    isa: str
    routing: str
    activation: str
    backend: str | None


def serving_matrix() -> Iterator[Cell]:
    """Every scheme with every routing method and activation, on every instruction set of this CPU."""
    isas = [entry.name for entry in cpu.instruction_sets() if entry.supported]
    methods = [method for method in RoutingMethod if method is not RoutingMethod.UNSPECIFIED]
    for name, method, activation in itertools.product(SCHEMES, methods, KINDS):
        config = MoEConfig(Scheme.parse(name), 8, 256, 256, Activation(activation), routing=method)
        backend = next((verdict.backend for verdict in explain(config) if verdict.obstacle is None), None)
        # All instruction sets have a row for every weight format, or the core would not compile.
        yield from (Cell(name, isa, method.value, activation, backend) for isa in isas)


def select_backend(config: MoEConfig, requested: str | None = None) -> Backend:
    """The backend for a layer: ``requested``, else ``CPUMOE_BACKEND``, else the first that serves it.

    ``requested="auto"`` is the same as None, and ``CPUMOE_BACKEND`` may be ``auto`` or empty. A requested backend that
    does not serve the layer raises NoBackend with its reason.
    """
    source = "backend"
    if requested is None or requested == _AUTO:
        source, requested = settings.BACKEND.name, settings.BACKEND.get() or _AUTO
    if requested != _AUTO:
        chosen = next((b for b in BACKENDS if b.name == requested), None)
        if chosen is None:
            names = ", ".join([*(b.name for b in BACKENDS), _AUTO])
            raise NoBackend(f"{source}={requested!r} is not known; accepted are {names}")
        if (reason := chosen.obstacle(config)) is not None:
            raise NoBackend(f"{source}={requested!r} cannot serve this layer: {reason}")
        return chosen
    refusals: list[str] = []
    for backend in BACKENDS:
        reason = backend.obstacle(config)
        if reason is None:
            _log_choice(backend.name, str(config.scheme), tuple(refusals))
            return backend
        refusals.append(f"{backend.name}: {reason}")
    raise NoBackend("no backend serves this layer: " + "; ".join(refusals))


_logged: set[tuple[str, str, tuple[str, ...]]] = set()


def _log_choice(backend: str, scheme: str, refusals: tuple[str, ...]) -> None:
    choice = (backend, scheme, refusals)
    if choice not in _logged:
        _logged.add(choice)
        because = f" ({'; '.join(refusals)})" if refusals else ""
        _log.info("%s experts run on the %s backend%s", scheme, backend, because)
