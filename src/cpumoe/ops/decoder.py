"""A whole decoder in one call of the core: what it consists of, as values, and the step.

The values say what a layer computes, never whose layer it is. Tensors are held as they are: packed weights (uint8) or
floats of the decoder's dtype, unless said otherwise; they must not be moved while the decoder lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.exchange import RankExchange


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm with weight [H] in fp32; see :func:`cpumoe.ops.rms_norm`."""

    weight: Tensor
    epsilon: float
    round_first: bool
    plus_one: bool


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear: packed, or floats [out, in] in fp32, bf16 or fp16 with a bias [out] in fp32.

    ``ranks``: over so many the outputs are spread in equal parts, of which this is one.
    """

    weight: Tensor
    bias: Tensor | None = None
    ranks: int = 1


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines [positions, width] in fp32 that the first ``width`` values of a head are turned by."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Latent:
    """Attention over cached latents in its absorbed form.

    Attributes:
        down: [.., H] or None: what queries are made of is made smaller first, and normed.
        latent: [rank + rotated, H]: the latent of a token, which is normed, and the rotated part of its keys.
        expansion: [heads * (nope + value_depth), rank], of the decoder's dtype.
    """

    down: Matrix | None
    down_norm: Norm | None
    latent: Matrix
    latent_norm: Norm | None
    expansion: Tensor
    rank: int
    nope: int
    rotated: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        query: [heads * depth, H]; without key and value it gives all three, side by side.
        key: [kv_heads * depth, H]. value: [kv_heads * value_depth, H]. out: [H, heads * value_depth].
        query_norm: over [depth], or with ``norms_whole_rows`` over all heads at once; ``key_norm`` likewise.
        norms_after_rotary: the norms come behind the rotation.
        rotary: the number of its table; -1 where positions are not in queries and keys.
        interleaved: pairs to be turned are neighbours, not half of the width apart.
        separated: they are neighbours before they are turned, and half of the width apart behind that.
        window: tokens that one sees, itself included; 0 for all before it.
        sinks: [heads] fp32, a score that every row has besides.
        query_factors: [positions] fp32: queries are multiplied by the factor of their position (Llama 4's attention
            temperature).
        gate: [heads * value_depth, H] or [heads, H]: the result times the sigmoid of what it gives.
        gated_queries: every head of ``query`` is followed by its gate: then it is [heads * 2 * depth, H].
        value_factor: values are multiplied by this.
        latent: where attention is over latents: then there are no key and value, kv_heads is 1, and a head of ``query``
            is nope + rotated wide, which is its depth. Caches then have latents and rotated parts side by side.
        ranks: over so many the heads are spread, of which these are one part; ``out`` takes those of all ranks.
    """

    query: Matrix
    key: Matrix | None
    value: Matrix | None
    out: Matrix
    heads: int
    kv_heads: int
    depth: int
    value_depth: int
    scale: float
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norms_whole_rows: bool = False
    norms_after_rotary: bool = False
    rotary: int = -1
    interleaved: bool = False
    separated: bool = False
    window: int = 0
    sinks: Tensor | None = None
    softcap: float = 0.0
    gate: Matrix | None = None
    gated_queries: bool = False
    value_factor: float = 1.0
    latent: Latent | None = None
    ranks: int = 1
    query_factors: Tensor | None = None


@dataclass(frozen=True)
class HeadColumns:
    """Where heads stand in a row: head h from column first + h // group * group_stride + h % group * head_stride on."""

    first: int
    group_stride: int
    group: int = 1
    head_stride: int = 0


@dataclass(frozen=True)
class DeltaColumns:
    """Where all that the delta rule takes stands in a row. Of ``betas`` and ``decays`` a head has one value.

    Where every channel has its own decay, a head has key_depth of them.
    """

    queries: HeadColumns
    keys: HeadColumns
    values: HeadColumns
    gates: HeadColumns
    betas: HeadColumns
    decays: HeadColumns


@dataclass(frozen=True)
class Expansion:
    """A linear of what another one has given, from column ``first`` of a row on."""

    matrix: Matrix
    first: int


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta net or Kimi delta attention, in the place of attention; see :func:`cpumoe.ops.gated_delta_rule`.

    The results of ``projections`` stand side by side in a row, and behind them those of ``expansions``.

    Attributes:
        log_rates: [heads]. decay_bias: [heads], or [heads * key_depth] where every channel has its own decay.
        conv_weight: [channels, taps], of queries, keys and values. conv_bias: [channels] or None.
        norm_weight: [value_depth].
        out: [H, heads * value_depth].
    """

    projections: tuple[Matrix, ...]
    expansions: tuple[Expansion, ...]
    columns: DeltaColumns
    key_heads: int
    heads: int
    key_depth: int
    value_depth: int
    log_rates: Tensor
    decay_bias: Tensor
    decay_bound: float
    conv_weight: Tensor
    conv_bias: Tensor | None
    norm_weight: Tensor
    norm_epsilon: float
    sigmoid_gate: bool
    out: Matrix


@dataclass(frozen=True)
class ShortConvolution:
    """A short convolution in the place of attention; see :func:`cpumoe.ops.short_convolution`.

    Attributes:
        projection: [3 * channels, H]. out: [H, channels].
        conv_weight: [channels, taps]. conv_bias: [channels] or None.
    """

    projection: Matrix
    out: Matrix
    conv_weight: Tensor
    conv_bias: Tensor | None


@dataclass(frozen=True)
class Activation:
    """An activation in the numbers of the core; see :class:`cpumoe.layers.activation.Activation`."""

    kind: int
    gated: bool
    alpha: float
    limit: float


@dataclass(frozen=True)
class Router:
    """How experts are chosen; see :func:`cpumoe.ops.select_experts`. ``in_fp32``: logits are not rounded."""

    weight: Matrix
    topk: int
    scoring: int
    score_chosen: bool
    renormalize: bool
    correction: Tensor | None
    groups: int
    topk_groups: int
    scale: float
    in_fp32: bool


@dataclass(frozen=True)
class Copies:
    """Where the experts of a layer are that is spread over ranks, as one of them sees it.

    Attributes:
        begins: int32 [experts + 1]: copies ``begins[e]`` to ``begins[e + 1] - 1`` are of expert e; rows that choose it
            take turns.
        places: int32 [copies]: where each is among those that are here, or -1.
        ranks: int32 [copies]: which rank has it.
    """

    begins: Tensor
    places: Tensor
    ranks: Tensor


class Travel(IntEnum):
    """Where the rows of a rank go to be computed."""

    STAY = 0  #: nowhere: every rank has all rows
    TO_ALL = 1  #: to every rank
    TO_EXPERTS = 2  #: to those that have one of the row's experts


@dataclass(frozen=True)
class RoutedExperts:
    """Packed experts behind a router.

    Attributes:
        gate_up, down: packed; None where experts are spread over ranks and none of them is here.
        spread: each rank has some experts or a slice of all of them, and their sums are added.
        copies: where they are; None for slices of all of them.
        loads: int64 [experts], in which it is counted how often each is chosen; None: it is not.
        travel: where rows go, if ranks do not have the same ones.
        prepared_rows: they travel as the first product wants them; all ranks have some experts then.
    """

    router: Router
    gate_up: Tensor | None
    down: Tensor | None
    activation: Activation
    weight_on_input: bool = False
    spread: bool = False
    copies: Copies | None = None
    loads: Tensor | None = None
    travel: Travel = Travel.STAY
    prepared_rows: bool = False


@dataclass(frozen=True)
class DenseBlock:
    """A feed-forward block that all tokens take.

    Attributes:
        gate: [I, H]; without it ``up`` is [2 * I, H], gate first, unless the activation is not gated.
        up: [I, H]. down: [H, I].
        share: [1, H]: its result times the sigmoid of that product.
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: Activation
    share: Matrix | None = None


@dataclass(frozen=True)
class Layer:
    """One layer: norms around attention and block, each of which is added to the residual stream.

    ``delta`` or ``convolution``: in the place of attention.
    """

    attention: Attention | None
    experts: RoutedExperts | None
    dense: DenseBlock | None
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_block: Norm | None = None
    after_block: Norm | None = None
    residual_factor: float = 1.0
    delta: DeltaRule | None = None
    convolution: ShortConvolution | None = None


@dataclass(frozen=True)
class DecoderModel:
    """All of a decoder. ``embedding`` [vocabulary, H] of the dtype of hidden states, ``head`` or None.

    ``exchange`` is of the ranks that experts are spread over, ``group`` of those that columns and heads are spread
    over: some of the former, with the same rows. Other groups have rows of their own.
    """

    embedding: Tensor
    embedding_factor: float
    rotary: tuple[Rotary, ...]
    layers: tuple[Layer, ...]
    norm: Norm | None
    head: Matrix | None
    exchange: RankExchange | None = None
    group: RankExchange | None = None


#: What a step keeps of a layer's tokens: keys, values and the place of their first token, or states.
LayerCache = tuple[Tensor, Tensor, int] | tuple[Tensor, ...]

#: What the seconds of a decoder are counted for, in their order.
STEP_PARTS = ("rows", "products", "attention", "routing", "experts", "head", "exchange")


class Decoder:
    """A decoder that computes steps. Threads may share one if each has its own caches; their steps run in turn."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self._core = _core.Decoder(model)
        self._hidden = model.embedding.shape[1]
        self._dtype = model.embedding.dtype
        self._vocabulary = 0 if model.head is None else self._core.vocabulary

    def step(
        self,
        tokens: Tensor,
        caches: Sequence[LayerCache],
        past: int,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        keep: int = 0,
        logits: bool = False,
    ) -> Tensor:
        """Computes T tokens behind ``past`` ones of each of B sequences, whose keys and values go into the caches.

        Args:
            tokens: int64 [B, T], or hidden states [B, T, H].
            caches: for each layer keys and values [B, kv_heads, room, depth], and the place of their first token; in
                int8 they are records, [B, kv_heads, room, cache_record_bytes(depth)]. Of a layer with the delta rule
                the states [B, channels, taps] of its convolution and, in fp32, [B, heads, key_depth, value_depth]; of
                a short convolution its state alone.
            past: places that are filled.
            positions: int64 [B, T] or [1, T]; by default those behind ``past``.
            padding: int64 [B], the places at the beginning of each sequence that no token sees.
            keep: results are those of the last so many tokens; 0 for all of them.
            logits: whether results are logits rather than hidden states behind the last norm.

        Returns:
            [B, T or keep, H or vocabulary].
        """
        batch, count = tokens.shape[:2]
        kept = min(keep, count) if keep > 0 else count
        out = torch.empty((batch, kept, self._vocabulary if logits else self._hidden), dtype=self._dtype)
        self._core.step(
            tokens, caches, past, positions, padding, kept, None if logits else out, out if logits else None
        )
        return out

    def step_rows(
        self,
        tokens: Tensor,
        sequences: Tensor,
        places: Tensor,
        pages: Tensor,
        page_tokens: int,
        caches: Sequence[tuple[Tensor, ...]],
        wanted: Tensor,
    ) -> Tensor:
        """Computes N tokens of any sequences, whose keys and values lie in pages.

        States of layers that have some go on from where the step before has left them, or begin with token 0.

        Args:
            tokens: int64 [N]; those of a sequence side by side, sequences and places ascending.
            sequences: int64 [N], the sequence of each. places: int64 [N], where in its sequence each is.
            pages: int32 [S, P]: the page of tokens p * page_tokens and the following of sequence s is pages[s, p].
            page_tokens: tokens of a page, a power of two from 16 on.
            caches: for each layer keys and values [pages, kv_heads, page_tokens, depth], or records or states as in
                :meth:`step`, the latter [S, ..].
            wanted: int64 [W], ascending: the rows whose logits are asked for.

        Returns:
            Logits [W, vocabulary].
        """
        out = torch.empty((len(wanted), self._vocabulary), dtype=self._dtype)
        self._core.step_rows(tokens, sequences, places, pages, page_tokens, caches, wanted, out)
        return out

    def help(self) -> bool:
        """Computes what the rows of other groups of ranks need of the experts here, in a step without rows of its own.

        Where groups have rows of their own, all ranks must take part in every step. Returns whether any group had rows.
        """
        return bool(self._core.help())

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each part of the steps since the last call."""
        return dict(zip(STEP_PARTS, self._core.take_seconds(), strict=True))
