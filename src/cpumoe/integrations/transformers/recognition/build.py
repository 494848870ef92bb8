"""Build a decoder from a recognised one: take the tensors of a base model where sources name them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor

from cpumoe.integrations.transformers.recognition.parts import matrix_of
from cpumoe.integrations.transformers.recognition.values import (
    BuildContext,
    LinearWeight,
    Source,
    Stored,
    UnsupportedDecoder,
)
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.experts import Experts
from cpumoe.ops import decoder
from cpumoe.ops.exchange import RankExchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.linear import SplitLinear


def build(base: Any, recognized: decoder.DecoderModel[Source], positions: Tensor) -> decoder.DecoderModel[Tensor]:
    """Build the decoder of a base model. Raise UnsupportedDecoder if a part of it cannot be used.

    Args:
        positions: int64 [P]; position p of a step is position ``positions[p]`` of the model.
    """
    model = cast(decoder.DecoderModel[Tensor], _built(recognized, BuildContext(base, positions)))
    exchange, group = _exchanges_of(base)
    return replace(model, exchange=exchange, group=group)


def _built(part: Any, context: BuildContext) -> Any:
    if isinstance(part, Source):
        return part.tensor(context)
    if isinstance(part, tuple):
        return tuple(_built(item, context) for item in part)
    if isinstance(part, decoder.Matrix) and isinstance(part.weight, LinearWeight):
        return matrix_of(context.module(part.weight.module))
    if isinstance(part, decoder.RoutedExperts):
        return _built_experts(part, context)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: _built(getattr(part, f.name), context) for f in fields(part)})


def _built_experts(part: decoder.RoutedExperts[Source], context: BuildContext) -> decoder.RoutedExperts[Tensor]:
    assert isinstance(part.gate_up, Stored)
    experts = context.module(part.gate_up.module)
    if not (
        isinstance(experts, Experts)
        and isinstance(experts.backend, NativeBackend)
        and experts.config.held_experts is None
    ):
        raise UnsupportedDecoder("its experts are not all here, or not served by the native kernels")
    return decoder.RoutedExperts[Tensor](router=_built(part.router, context), **vars(experts.for_core(context.dtype)))


def _exchanges_of(base: Any) -> tuple[RankExchange | None, RankExchange | None]:
    """Return the exchanges of the ranks that share a model's experts, and of the group that shares its linears."""
    modules = list(base.modules())
    if (experts := next((m for m in modules if isinstance(m, ParallelExperts)), None)) is not None:
        return experts.ranks.exchange, experts.ranks.group.exchange
    # A layer without experts, alone: then it is the group that has its rows.
    linear = next((m for m in modules if isinstance(m, SplitLinear)), None)
    return (None, None) if linear is None else (linear.ranks.exchange, linear.ranks.exchange)


def with_own_heads(model: decoder.DecoderModel[Tensor], rank: int, ranks: int) -> decoder.DecoderModel[Tensor]:
    """Return the same decoder with the heads of one rank in every attention whose projections are split.

    Results are the same; keys and values are those of a rank's own heads. Attention whose heads do not divide, or are
    normed together, stays whole: what its projections give is gathered.
    """

    def own(mixer: decoder.Mixer[Tensor]) -> decoder.Mixer[Tensor]:
        if not isinstance(mixer, decoder.Attention):
            return mixer
        names = ("query", "gate") if isinstance(mixer, decoder.Mla) else ("query", "key", "value", "gate")
        split = {name: m for name in names if (m := getattr(mixer, name)) is not None}
        if mixer.heads % ranks or any(m.ranks != ranks for m in (*split.values(), mixer.out)):
            return mixer
        local = {name: replace(m, ranks=1) for name, m in split.items()}
        sinks = None if mixer.sinks is None else mixer.sinks.chunk(ranks)[rank].contiguous()
        heads = mixer.heads // ranks
        if isinstance(mixer, decoder.Mla):
            expansion = mixer.expansion.chunk(ranks)[rank].contiguous()
            return replace(mixer, **local, heads=heads, sinks=sinks, expansion=expansion, ranks=ranks)
        if mixer.kv_heads % ranks or mixer.norms_whole_rows:
            return mixer
        return replace(mixer, **local, heads=heads, kv_heads=mixer.kv_heads // ranks, sinks=sinks, ranks=ranks)

    return replace(model, layers=tuple(replace(layer, mixer=own(layer.mixer)) for layer in model.layers))
