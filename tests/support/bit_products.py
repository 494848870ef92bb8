"""Ledger of bits: packing, fused experts, linears and activation quantisation, for every scheme and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from bit_cases import Case, Compute, Recorder
from bit_numbers import integers, numbers
from random_layers import linear_inputs
from torch import Tensor

import cpumoe
from cpumoe import ops
from cpumoe.layers.activation import KINDS
from cpumoe.layers.activation_rounding import input_scale_arguments
from cpumoe.layers.packed_weights import multiplies_floats
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import SCHEMES
from cpumoe.ops.decoder import Travel
from cpumoe.ops.exchange import CarriedExchange, choose_slots, prepared_token_bytes, spread_experts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Groups that are not a power of two are held in smaller parts.
_ODD_GROUPS = ("w4a8-g96", "w4a8-g192", "w8a16-g96", "w4a16-g96-asym")

_EXPERTS, _TOPK = 4, 2
_TOKENS = 37  # more than 16 rows for some experts, fewer for others

#: One scheme for each kind of rows: int8, int16, floats.
_ROW_KINDS = ("w4a8", "w4a16-g32", "fp8")


def product_cases() -> Iterator[Case]:
    """Yield the cases of all operators that multiply with packed weights."""
    for scheme in (*SCHEMES, *_ODD_GROUPS):
        rounds = rounds_on_amx(scheme)
        yield Case(f"pack/{scheme}", lambda s=scheme: _packing(s), is_fast=True)
        yield Case(f"experts/{scheme}", lambda s=scheme: _experts(s), is_fast=True, rounds_on_amx=rounds)
        yield Case(f"linear/{scheme}", lambda s=scheme: _linear(s), is_fast=True, rounds_on_amx=rounds)
    for scheme in _ROW_KINDS:
        rounds = rounds_on_amx(scheme)
        for activation in (*KINDS, *(f"{name}_no_mul" for name in ("silu", "gelu", "gelu_tanh"))):
            prepare = lambda s=scheme, a=activation: _activation(s, a)  # noqa: E731
            yield Case(f"activation/{activation}/{scheme}", prepare, is_fast=True, rounds_on_amx=rounds)
        prepare = lambda s=scheme: _options(s)  # noqa: E731
        yield Case(f"experts options/{scheme}", prepare, is_fast=True, rounds_on_amx=rounds)
    yield Case("experts/activation order", _activation_order, is_fast=True)
    yield Case("experts/dynamic_4bit_int_moe", _four_bit_operator, is_fast=True)
    yield Case("choose_slots", _slots, is_fast=True)


def rounds_on_amx(scheme: str) -> bool:
    """Return whether AMX has bits of its own for a scheme."""
    return multiplies_floats(cpumoe.Scheme.parse(scheme))


def _inner(scheme: str) -> int:
    """Return an intermediate size that the groups of a scheme divide."""
    size = cpumoe.Scheme.parse(scheme).group_size or 32
    return -(-96 // size) * size


def _layer(scheme: str, *, activation: str = "silu", dtype: torch.dtype = torch.float32, **more: Any) -> cpumoe.Experts:
    """Return packed experts with biases; bf16 weights have bf16 scales."""
    parsed, kind = cpumoe.Scheme.parse(scheme), cpumoe.Activation(activation)
    inner = _inner(scheme)
    hidden, rows = max(inner, 128) if parsed.fits(128) else inner, kind.gate_up_rows(inner)
    return cpumoe.Experts.quantize(
        numbers("gate_up", _EXPERTS, rows, hidden, scale=2.0**-3, dtype=dtype),
        numbers("down", _EXPERTS, hidden, inner, scale=2.0**-3, dtype=dtype),
        parsed,
        gate_up_bias=numbers("gate_up bias", _EXPERTS, rows, scale=2.0**-3),
        down_bias=numbers("down bias", _EXPERTS, hidden, scale=2.0**-3),
        activation=kind,
        backend="native",
        **input_scale_arguments(parsed, 4.0, 4.0),
        **more,
    )


def _routing() -> tuple[Tensor, Tensor]:
    """Return ids, some of them -1, and weights."""
    ids = torch.stack([integers(f"ids {token}", 0, _EXPERTS, _TOPK) for token in range(_TOKENS)])
    ids[5, 1] = -1
    return ids, numbers("weights", _TOKENS, _TOPK, scale=2.0**-2, offset=0.5)


def _tokens(width: int, dtype: torch.dtype) -> Tensor:
    return numbers("tokens", _TOKENS, width, scale=2.0, dtype=dtype)


def _is_alone(scheme: str) -> bool:
    """Return whether the bits of a token do not depend on the others: one scale may be found for all of them."""
    return scheme != "fp8-tensor-dynamic"


def _packing(scheme: str) -> Compute:
    def compute(recorder: Recorder) -> None:
        for name, dtype in DTYPES.items():
            if name == "fp16":
                continue  # has fp32 scales, as fp32 has
            layer = _layer(scheme, dtype=dtype)
            recorder.add(f"packed from {name}", layer.gate_up_packed, layer.down_packed)
            unpacked = [part for blob in (layer.gate_up_packed, layer.down_packed) for part in ops.unpack(blob)]
            recorder.add(f"unpacked from {name}", *_bytes([part for part in unpacked if part is not None]))

    return compute


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    """Return fp8 numbers as bytes."""
    return [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]


def _experts(scheme: str) -> Compute:
    layers = {name: _layer(scheme, dtype=dtype) for name, dtype in DTYPES.items()}
    ids, weights = _routing()

    def compute(recorder: Recorder) -> None:
        for name, dtype in DTYPES.items():
            layer = layers[name]
            x = _tokens(layer.config.hidden_size, dtype)
            out = layer(x, ids, weights)
            recorder.add(name, out)
            if _is_alone(scheme):
                alone = [layer(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(3)]
                recorder.add(name, torch.cat((*alone, layer(x[3:], ids[3:], weights[3:]))), variant="few tokens")
            gate_up = layer.gate_up_packed
            if prepared_token_bytes(gate_up, dtype):
                prepared, sums = _sent_to_itself(layer, x, ids, weights)
                recorder.add(f"{name} prepared tokens", prepared)
                recorder.add(name, sums.to(dtype), variant="prepared tokens")

    return compute


def _left_alone(_: object) -> None:
    """The sum or the largest value over one rank."""


def _sent_to_itself(layer: cpumoe.Experts, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens as they travel prepared, and the sums, of a rank that sends all of them to itself."""
    messages: list[bytes] = []

    def gather(mine: memoryview, sizes: Sequence[int], everything: memoryview) -> None:
        messages.append(bytes(mine))
        everything[:] = mine

    def trade(mine: memoryview, sizes: Sequence[int], everything: memoryview, given: Sequence[int]) -> None:
        everything[:] = mine

    experts = replace(layer.for_core(x.dtype), spread=True, travel=Travel.TO_ALL, prepared_rows=True)
    exchange = CarriedExchange(0, 1, gather, trade, _left_alone, _left_alone)
    sums = spread_experts(x, ids, weights, experts, 0, exchange, None)
    shape = len(x), prepared_token_bytes(layer.gate_up_packed, x.dtype)
    rows = messages[1][: shape[0] * shape[1]]  # behind them are their experts and weights
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(shape), sums


def _linear(scheme: str) -> Compute:
    parsed = cpumoe.Scheme.parse(scheme)
    inputs = next(size for size in (160, 192, 256) if parsed.fits(size))
    weight, bias = numbers("weight", 70, inputs, scale=2.0**-3), numbers("bias", 70)
    linear = cpumoe.QuantizedLinear.quantize(weight, scheme, bias, **linear_inputs(scheme, 4.0))

    def compute(recorder: Recorder) -> None:
        for name, dtype in DTYPES.items():
            x = _tokens(inputs, dtype)
            out = linear(x)
            recorder.add(name, out)
            recorder.add(f"{name} one token", linear(x[:1]))
            recorder.add(name, linear(x, fp32_out=True).to(dtype), variant="from fp32")
            if _is_alone(scheme):
                parts = [linear(part) for part in x.split((1, 4, 17, 15))]
                recorder.add(name, torch.cat(parts), variant="few tokens")

    return compute


def _activation(scheme: str, activation: str) -> Compute:
    layer, (ids, weights) = _layer(scheme, activation=activation), _routing()

    def compute(recorder: Recorder) -> None:
        recorder.add("fp32", layer(_tokens(layer.config.hidden_size, torch.float32), ids, weights))

    return compute


def _options(scheme: str) -> Compute:
    """Router weights on the input, sums in fp32, gate and up rows in turn."""
    layer, (ids, weights) = _layer(scheme), _routing()
    x = _tokens(layer.config.hidden_size, torch.bfloat16)

    def compute(recorder: Recorder) -> None:
        recorder.add("weight on input", layer(x, ids, weights, apply_router_weight_on_input=True))
        recorder.add("fp32 sums", layer(x, ids, weights, fp32_out=True))
        recorder.add("interleaved rows", _layer(scheme, interleaved=True)(x, ids, weights))

    return compute


def _activation_order() -> Compute:
    """Weights whose groups are of inputs that do not lie side by side."""
    scheme, inputs = cpumoe.Scheme.parse("w4a16-g32"), 160
    weight = quantize_weight(numbers("weight", 70, inputs, scale=2.0**-3), scheme)
    order = numbers("order", inputs).argsort(stable=True).to(torch.int32).view(1, inputs)
    linear = cpumoe.QuantizedLinear.from_weight(replace(weight, input_order=order), scheme)

    def compute(recorder: Recorder) -> None:
        recorder.add("packed", linear.weight_packed)
        recorder.add("linear", linear(_tokens(inputs, torch.float32)))

    return compute


def _four_bit_operator() -> Compute:
    layer, (ids, weights) = _layer("w4a8-g32"), _routing()
    hidden, inner = layer.config.hidden_size, layer.config.intermediate_size
    x = _tokens(hidden, torch.float32)
    sizes = (hidden, inner, 2 * inner, 32, False)

    def compute(recorder: Recorder) -> None:
        packed = layer.gate_up_packed, layer.down_packed
        recorder.add("silu", layer(x, ids, weights))
        out = torch.ops.cpumoe.dynamic_4bit_int_moe(x, ids, weights, *packed, *sizes, 0)
        recorder.add("silu", out, variant="dynamic_4bit_int_moe")
        recorder.add("swiglu_oai", torch.ops.cpumoe.dynamic_4bit_int_moe(x, ids, weights, *packed, *sizes, 1))

    return compute


def _slots() -> Compute:
    ids, _ = _routing()
    copies = torch.tensor([0, 2, 3, 4, 6], dtype=torch.int32), torch.tensor([0, 4, 1, 2, 3, 5], dtype=torch.int32)

    def compute(recorder: Recorder) -> None:
        loads = torch.zeros(_EXPERTS, dtype=torch.int64)
        recorder.add("slots", choose_slots(ids, copies, 3, loads), loads)

    return compute
