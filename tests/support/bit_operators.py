"""Ledger of bits: routing, norms, attention, recurrent layers, int8 KV entries and collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from bit_cases import Case, Compute, Recorder
from bit_numbers import integers, numbers
from bit_products import DTYPES
from torch import Tensor

import cpumoe
from cpumoe import ops
from cpumoe.ops.exchange import SharedExchange


def operator_cases() -> Iterator[Case]:
    """Yield the cases of all operators without packed weights."""
    yield Case("select_experts", _routing, is_fast=True)
    for name, dtype in DTYPES.items():
        for operator, prepare in _BY_DTYPE.items():
            yield Case(f"{operator}/{name}", lambda p=prepare, d=dtype: p(d), is_fast=True)
    yield Case("exchange", _exchange, is_fast=True, runs_once=True)


def _routing() -> Compute:
    tokens, experts = 19, 24
    logits = numbers("logits", tokens, experts, scale=4.0)
    bias = numbers("correction bias", experts, scale=2.0**-2)
    groups = {"num_expert_group": 4, "topk_group": 2}
    options: dict[str, tuple[int, dict[str, Any]]] = {
        "default": (4, {"method": "default"}),
        "default with groups": (4, {"method": "default", **groups}),
        "renormalize": (4, {"method": "renormalize"}),
        "renormalize sigmoid": (4, {"method": "renormalize", "scoring": "sigmoid"}),
        "llama4": (1, {"method": "llama4"}),
        "topk": (4, {"method": "topk"}),
    }
    for scoring in ("softmax", "sigmoid", "sqrt_softplus"):
        options[f"renormalize_naive {scoring}"] = 4, {"method": "renormalize_naive", "scoring": scoring}
        grouped = {"method": "deepseek_v3", "scoring": scoring, "correction_bias": bias, **groups}
        options[f"deepseek_v3 {scoring}"] = 4, {**grouped, "routed_scaling_factor": 2.5}
        options[f"deepseek_v3 {scoring} as they are"] = 4, {**grouped, "renormalize": False}

    def compute(recorder: Recorder) -> None:
        for name, (topk, chosen) in options.items():
            for dtype_name, dtype in DTYPES.items():
                rows = logits.to(dtype)
                recorder.add(f"{name}/{dtype_name}", *cpumoe.select_experts(rows, topk, **chosen))
                parts = [cpumoe.select_experts(part, topk, **chosen) for part in rows.split((1, 18))]
                joined = (torch.cat(both) for both in zip(*parts, strict=True))
                recorder.add(f"{name}/{dtype_name}", *joined, variant="few tokens")

    return compute


def _router_logits(dtype: torch.dtype) -> Compute:
    x, weight = numbers("tokens", 19, 144, dtype=dtype), numbers("weight", 24, 144, scale=2.0**-2, dtype=dtype)
    bias = numbers("bias", 24)

    def compute(recorder: Recorder) -> None:
        for in_fp32 in (False, True):
            name = "in fp32" if in_fp32 else "rounded"
            recorder.add(name, ops.router_logits(x, weight, bias, in_fp32))
            parts = [ops.router_logits(part, weight, bias, in_fp32) for part in x.split((1, 18))]
            recorder.add(name, torch.cat(parts), variant="few tokens")
        recorder.add("without bias", ops.router_logits(x, weight, None, False))
        recorder.add("token_linear", ops.token_linear(x[:1], weight, bias))

    return compute


def _norm(dtype: torch.dtype) -> Compute:
    x, weight = numbers("x", 5, 100, dtype=dtype), numbers("weight", 100, scale=2.0**-2, offset=1.0, dtype=dtype)

    def compute(recorder: Recorder) -> None:
        for round_first in (False, True):
            for plus_one in (False, True):
                name = f"{'rounded first' if round_first else 'rounded last'}{', plus one' if plus_one else ''}"
                recorder.add(name, ops.rms_norm(x, weight, 1e-5, round_first, plus_one))

    return compute


def _decode_attention(dtype: torch.dtype) -> Compute:
    batch, heads, kv_heads, tokens, depth, value_depth = 2, 6, 2, 150, 24, 40
    query = numbers("query", batch, heads, depth, scale=2.0, dtype=dtype)
    keys = numbers("keys", batch, kv_heads, tokens, depth, dtype=dtype)
    values = numbers("values", batch, kv_heads, tokens, value_depth, dtype=dtype)
    mask = torch.zeros(batch, tokens)
    mask[0, :7] = -torch.inf
    sinks = numbers("sinks", heads)

    def compute(recorder: Recorder) -> None:
        recorder.add("plain", ops.decode_attention(query, keys, values, None, 0.25))
        recorder.add("mask", ops.decode_attention(query, keys, values, mask, 0.25))
        recorder.add("mask and sinks", ops.decode_attention(query, keys, values, mask, 0.25, sinks))
        few = ops.decode_attention(query, keys[:, :, :3], values[:, :, :3], None, 0.25)
        recorder.add("three tokens", few)
        alone = [
            ops.decode_attention(query[i : i + 1], keys[i : i + 1], values[i : i + 1], None, 0.25) for i in range(batch)
        ]
        recorder.add("plain", torch.cat(alone), variant="alone")

    return compute


def _latent_attention(dtype: torch.dtype) -> Compute:
    batch, heads, queries, tokens, nope, rotary, value_depth, rank = 2, 4, 5, 140, 16, 8, 24, 32
    query = numbers("query", batch, heads, queries, nope + rotary, dtype=dtype)
    latents = numbers("latents", batch, 1, tokens, rank, dtype=dtype)
    rotated = numbers("rotated", batch, 1, tokens, rotary, dtype=dtype)
    weight = numbers("weight", heads * (nope + value_depth), rank, scale=2.0**-2, dtype=dtype)
    mask = torch.zeros(batch, queries, tokens)
    mask[0, :, :9] = -torch.inf
    for i in range(queries):
        mask[:, i, tokens - queries + i + 1 :] = -torch.inf
    sinks = numbers("sinks", heads)

    def compute(recorder: Recorder) -> None:
        recorder.add("mask", ops.latent_attention(query, latents, rotated, weight, mask, 0.25))
        recorder.add("mask and sinks", ops.latent_attention(query, latents, rotated, weight, mask, 0.25, sinks))
        last = query[:, :, -1:], latents, rotated, weight
        recorder.add("one query", ops.latent_attention(*last, None, 0.25))
        parts = [
            ops.latent_attention(query[:, :, part], latents, rotated, weight, mask[:, part].contiguous(), 0.25)
            for part in (slice(0, 2), slice(2, 5))
        ]
        recorder.add("mask", torch.cat(parts, 1), variant="in chunks")

    return compute


#: Tokens of a prompt in chunks; the last one is decoded.
_CHUNKS = (11, 1, 20, 2, 1)


def _in_chunks(
    recorder: Recorder, name: str, states: list[Tensor], compute: Callable[[slice, list[Tensor]], Tensor]
) -> None:
    """Record results and states of all tokens at once, and of the same tokens in chunks, which must be equal."""
    for variant in ("", "in chunks"):
        own, parts, first = [state.clone() for state in states], [], 0
        for count in _CHUNKS if variant else (sum(_CHUNKS),):
            parts.append(compute(slice(first, first + count), own))
            first += count
        recorder.add(f"{name}/result", torch.cat(parts, 1), variant=variant)
        recorder.add(f"{name}/states", *own, variant=variant)


def _gated_delta_rule(dtype: torch.dtype) -> Compute:
    batch, tokens, key_heads, heads, dk, dv, taps = 2, sum(_CHUNKS), 2, 6, 24, 40, 4
    channels = 2 * key_heads * dk + heads * dv

    def some(name: str, *shape: int, **options: Any) -> Tensor:
        return numbers(name, *shape, **{"dtype": dtype, **options})

    states = [
        some("conv state", batch, channels, taps),
        some("state", batch, heads, dk, dv, scale=2.0**-2, dtype=torch.float32),
    ]

    def compute(recorder: Recorder) -> None:
        for kind, per_head in (("gated delta net", 1), ("Kimi delta attention", dk)):
            widths = {"q": key_heads * dk, "k": key_heads * dk, "v": heads * dv, "z": heads * dv}
            rows = [some(name, batch, tokens, width) for name, width in widths.items()]
            rows += [some("b", batch, tokens, heads), some("a", batch, tokens, heads * per_head)]
            for bound, sigmoid in ((0.0, False), (-5.0, True)):
                parameters = (
                    *(key_heads, some("rates", heads), some("decay bias", heads * per_head), bound),
                    *(some("conv", channels, 1, taps), some("conv bias", channels)),
                )
                norm = (some("norm", dv, scale=2.0**-2, offset=1.0), 1e-5, sigmoid)

                def chunk(
                    part: slice,
                    own: list[Tensor],
                    rows: Any = rows,
                    parameters: Any = parameters,
                    norm: Any = norm,
                ) -> Tensor:
                    return ops.gated_delta_rule(*(row[:, part] for row in rows), *parameters, *own, *norm)

                _in_chunks(recorder, f"{kind}{', bound' if bound else ''}", states, chunk)

    return compute


def _short_convolution(dtype: torch.dtype) -> Compute:
    batch, channels, taps = 2, 40, 3
    projected = numbers("projected", batch, sum(_CHUNKS), 3 * channels, dtype=dtype)
    weight, bias = numbers("weight", channels, 1, taps, dtype=dtype), numbers("bias", channels, dtype=dtype)
    state = numbers("state", batch, channels, taps, dtype=dtype)

    def compute(recorder: Recorder) -> None:
        for name, given in (("with bias", bias), ("without bias", None)):
            _in_chunks(
                recorder,
                name,
                [state],
                lambda part, own, given=given: ops.short_convolution(projected[:, part], weight, given, *own),  # type: ignore[misc]
            )

    return compute


def _mamba2(dtype: torch.dtype) -> Compute:
    batch, tokens, heads, head_dim, groups, depth, width = 2, sum(_CHUNKS), 4, 24, 2, 16, 4
    inner = heads * head_dim
    channels = inner + 2 * groups * depth
    projected = numbers("projected", batch, tokens, inner + channels + heads, dtype=dtype)
    states = [
        numbers("conv state", batch, channels, width, dtype=dtype),
        numbers("state", batch, heads, head_dim, depth),
    ]
    parameters = (
        *(numbers("conv", channels, 1, width, dtype=dtype), numbers("conv bias", channels, dtype=dtype)),
        *(numbers("dt bias", heads), numbers("A_log", heads), numbers("D", heads, dtype=dtype)),
    )
    norm = numbers("norm", inner, scale=2.0**-2, offset=1.0, dtype=dtype)
    mask = torch.ones(batch, tokens)
    mask[0, :3] = 0

    def compute(recorder: Recorder) -> None:
        for name, weight, given, gate_last in (
            ("norm", norm, None, False),
            ("norm, gate last, padding", norm, mask, True),
            ("no norm", None, None, False),
        ):

            def chunk(
                part: slice, own: list[Tensor], weight: Any = weight, given: Any = given, gate_last: bool = gate_last
            ) -> Tensor:
                masked = None if given is None else given[:, part].contiguous()
                more = (weight, masked, groups, inner // groups, 1e-5, gate_last, 0.0, float("inf"))
                return ops.mamba2(projected[:, part], *own, *parameters, *more)

            _in_chunks(recorder, name, states, chunk)

    return compute


def _mamba(dtype: torch.dtype) -> Compute:
    """Mamba's convolution and its state space."""
    batch, tokens, channels, depth, width = 2, sum(_CHUNKS), 20, 16, 4
    projected = numbers("projected", batch, tokens, 2 * channels, dtype=dtype)
    conv_state = numbers("conv state", batch, channels, width, dtype=dtype)
    conv = numbers("conv", channels, 1, width, dtype=dtype), numbers("conv bias", channels, dtype=dtype)
    rows = [numbers(name, batch, tokens, channels, dtype=dtype) for name in ("x", "steps")]
    parameters = numbers("parameters", batch, tokens, 3 + 2 * depth, dtype=dtype)
    state = numbers("state", batch, channels, depth)
    step_bias, skip = (numbers(name, channels, dtype=dtype) for name in ("step bias", "D"))
    rates = numbers("A_log", channels, depth)
    weights = [numbers(name, depth, scale=2.0**-2, offset=1.0, dtype=dtype) for name in ("b weight", "c weight")]

    def convolve(part: slice, own: list[Tensor]) -> Tensor:
        return ops.mamba_convolution(projected[:, part], *own, *conv, None)

    def scan(part: slice, own: list[Tensor], normed: list[Tensor | None]) -> Tensor:
        x, steps = (row[:, part] for row in rows)
        shared = parameters[:, part], rates, skip, projected[:, part]
        return ops.selective_scan(x, steps, step_bias, *shared, *own, *normed, 1e-6)

    def compute(recorder: Recorder) -> None:
        _in_chunks(recorder, "convolution", [conv_state], convolve)
        _in_chunks(recorder, "scan", [state], lambda part, own: scan(part, own, [None, None]))
        _in_chunks(recorder, "scan, norms", [state], lambda part, own: scan(part, own, [*weights]))

    return compute


def _lightning_attention(dtype: torch.dtype) -> Compute:
    """A state is rounded to its dtype once a call: in 16 bits, chunks have bits of their own."""
    batch, tokens, heads, depth = 2, sum(_CHUNKS), 4, 16
    qkv = numbers("qkv", batch, tokens, heads * 3 * depth, scale=2.0**-1, dtype=dtype)
    slopes = numbers("slopes", heads, scale=2.0**-3, offset=0.5)
    state = numbers("state", batch, heads, depth, depth, dtype=dtype)

    def compute(recorder: Recorder) -> None:
        recorder.add("first tokens", *ops.lightning_attention(qkv, slopes, heads, None))
        recorder.add("later tokens", *ops.lightning_attention(qkv, slopes, heads, state))
        if dtype == torch.float32:
            before, parts = state, []
            for part in qkv.split(_CHUNKS, 1):
                out, before = ops.lightning_attention(part, slopes, heads, before)
                parts.append(out)
            recorder.add("later tokens", torch.cat(parts, 1), before, variant="in chunks")

    return compute


def _kv_entries(dtype: torch.dtype) -> Compute:
    """Write int8 KV entries of head sizes with one scale and with several, and read them back."""

    def compute(recorder: Recorder) -> None:
        for depth in (5, 16, 64, 130):
            values = numbers("values", 3, 7, depth, scale=4.0, dtype=dtype)
            entries = ops.to_cache_records(values)
            recorder.add(f"written/head size {depth}", entries)
            back = ops.from_cache_records(entries, depth, dtype)
            recorder.add(f"read/head size {depth}", back)
            recorder.add(f"written/head size {depth}", ops.to_cache_records(back), variant="from what was read")

    return compute


_BY_DTYPE: dict[str, Callable[[torch.dtype], Compute]] = {
    "router_logits": _router_logits,
    "rms_norm": _norm,
    "decode_attention": _decode_attention,
    "latent_attention": _latent_attention,
    "gated_delta_rule": _gated_delta_rule,
    "short_convolution": _short_convolution,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "lightning_attention": _lightning_attention,
    "int8 KV": _kv_entries,
}


def _exchange() -> Compute:
    """Sums and maxima over ranks that are threads with shared memory."""

    def compute(recorder: Recorder) -> None:
        for ranks in (2, 3, 4):
            slot_bytes = 4096
            memory = os.memfd_create("bits")
            os.ftruncate(memory, SharedExchange.file_bytes(ranks, slot_bytes))
            exchanges = []
            for rank in range(ranks):  # each opens it for itself: locks tell ranks apart by the open file
                file = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
                exchanges.append(SharedExchange(file, rank, ranks, slot_bytes, 60.0))
                os.close(file)
            os.close(memory)
            with ThreadPoolExecutor(ranks) as threads:
                for count in (1, 100, 5000):
                    for rank, found in enumerate(threads.map(lambda e, n=count: _reduced(e, n), exchanges)):  # type: ignore[misc]
                        variant = f"rank {rank}" if rank else ""
                        recorder.add(f"{ranks} ranks/{count} values", *found, variant=variant)

    return compute


def _reduced(exchange: SharedExchange, count: int) -> tuple[Tensor, Tensor]:
    """Return the sums and maxima of all ranks, of numbers whose sizes show the order of additions."""
    name = f"rank {exchange.rank}"
    values = numbers(name, count) * (1 << integers(name, 0, 24, count)).float()
    sums, largest = values.clone(), values.clone()
    exchange.sum(sums)
    exchange.largest(largest)
    return sums, largest
