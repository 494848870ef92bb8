"""A decoder as values: the structs of core/decoder/schema.h, field by field.

The values say what a layer computes, never whose layer it is. Tensors are held as they are: packed weights (uint8) or
floats of the decoder's dtype, unless said otherwise; they must not be moved while the decoder lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

from torch import Tensor

from cpumoe.ops.exchange import RankExchange

#: The leaves of a decoder: tensors, or where a model has them (recognition/values.py).
T = TypeVar("T")


@dataclass(frozen=True)
class Norm(Generic[T]):
    """A root-mean-square norm with weight [H] in fp32; see :func:`cpumoe.ops.rms_norm`."""

    weight: T
    epsilon: float
    round_first: bool
    plus_one: bool


@dataclass(frozen=True)
class Matrix(Generic[T]):
    """The weight of a linear: packed, or floats [out, in] in fp32, bf16 or fp16 with a bias [out] in fp32.

    ``ranks``: over so many the outputs are spread in equal parts, of which this is one.
    """

    weight: T
    bias: T | None = None
    ranks: int = 1


@dataclass(frozen=True)
class RopeTable(Generic[T]):
    """Cosines and sines of RoPE [positions, width] in fp32, for the first ``width`` values of a head."""

    cos: T
    sin: T


@dataclass(frozen=True)
class Rope:
    """How a mixer applies RoPE.

    Attributes:
        table: index in ``DecoderModel.rope``; -1 for no RoPE.
        interleaved: pairs that are rotated are neighbours, not half of the width apart.
        separated: pairs are neighbours before the rotation, and half of the width apart after it.
    """

    table: int = -1
    interleaved: bool = False
    separated: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention(Generic[T]):
    """Fields that GQA and MLA share.

    Attributes:
        query: [heads * head_dim, H]. out: [H, heads * value_dim] of all ranks.
        window: sliding window, tokens that a query sees, itself included; 0 for no window.
        sinks: [heads] fp32, attention scores without values.
        query_factors: [positions] fp32, factors of queries (Llama 4's attention temperature).
        gate: [heads * value_dim, H] or [heads, H]: the result times the sigmoid of its output.
        ranks: number of tensor parallel ranks that share the heads; these are the heads of one rank.
    """

    query: Matrix[T]
    out: Matrix[T]
    heads: int
    value_dim: int
    scale: float
    gate: Matrix[T] | None = None
    rope: Rope = Rope()
    window: int = 0
    sinks: T | None = None
    query_factors: T | None = None
    softcap: float = 0.0
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Gqa(Attention[T]):
    """Grouped-query attention.

    Attributes:
        key: [kv_heads * head_dim, H]. value: [kv_heads * value_dim, H]. Without both, ``query`` computes all three side
            by side.
        gated_queries: every head of ``query`` is followed by its gate: then it is [heads * 2 * head_dim, H].
        value_factor: factor of values.
        query_norm: over [head_dim], or with ``norms_whole_rows`` over all heads at once; ``key_norm`` likewise.
    """

    key: Matrix[T] | None
    value: Matrix[T] | None
    kv_heads: int
    head_dim: int
    gated_queries: bool = False
    value_factor: float = 1.0
    query_norm: Norm[T] | None = None
    key_norm: Norm[T] | None = None
    norms_whole_rows: bool = False
    norms_after_rope: bool = False


@dataclass(frozen=True, kw_only=True)
class Mla(Attention[T]):
    """Multi-head latent attention in its absorbed form. Heads of ``query`` are nope_dim + rope_dim wide.

    Attributes:
        query_down: q_a_proj or None; its output is normed.
        latent: kv_a_proj_with_mqa, [kv_lora_rank + rope_dim, H]: the latent of a token, and the rotated part of its
            key. The KV cache has both, side by side.
        expansion: kv_b_proj, [heads * (nope_dim + value_dim), kv_lora_rank], in the decoder's dtype.
    """

    query_down: Matrix[T] | None
    query_down_norm: Norm[T] | None
    latent: Matrix[T]
    latent_norm: Norm[T] | None
    expansion: T
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int


@dataclass(frozen=True)
class HeadColumns:
    """Position of heads in a row: head h from column first + h // group * group_stride + h % group * head_stride on."""

    first: int
    group_stride: int
    group: int = 1
    head_stride: int = 0


@dataclass(frozen=True)
class Expansion(Generic[T]):
    """A linear of columns of a row, from column ``first`` on: the second factor of a low-rank projection."""

    matrix: Matrix[T]
    first: int


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Generic[T]):
    """A gated delta net or Kimi delta attention; see :func:`cpumoe.ops.gated_delta_rule`.

    A row has the outputs of ``projections`` side by side, then those of ``expansions``.

    Attributes:
        queries, keys, values, gates: columns of the row. betas: one column a head. decays: likewise, or key_dim columns
            a head if every channel has its own decay.
        log_rates: A_log, [heads]. decay_bias: dt_bias, [heads] or [heads * key_dim].
        conv_weight: [channels, taps], of queries, keys and values. conv_bias: [channels] or None.
        norm_weight: [value_dim].
        out: [H, heads * value_dim].
    """

    projections: tuple[Matrix[T], ...]
    expansions: tuple[Expansion[T], ...]
    queries: HeadColumns
    keys: HeadColumns
    values: HeadColumns
    gates: HeadColumns
    betas: HeadColumns
    decays: HeadColumns
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    log_rates: T
    decay_bias: T
    decay_bound: float
    conv_weight: T
    conv_bias: T | None
    norm_weight: T
    norm_epsilon: float
    sigmoid_gate: bool
    out: Matrix[T]


@dataclass(frozen=True)
class ShortConv(Generic[T]):
    """A short convolution; see :func:`cpumoe.ops.short_convolution`.

    Attributes:
        projection: in_proj, [3 * channels, H]. out: out_proj, [H, channels].
        conv_weight: [channels, taps]. conv_bias: [channels] or None.
    """

    projection: Matrix[T]
    out: Matrix[T]
    conv_weight: T
    conv_bias: T | None


#: What mixes the tokens of a sequence.
Mixer: TypeAlias = Gqa[T] | Mla[T] | DeltaNet[T] | ShortConv[T]
MIXERS = (Gqa, Mla, DeltaNet, ShortConv)


@dataclass(frozen=True)
class Activation:
    """An activation in the numbers of the core; see :class:`cpumoe.layers.activation.Activation`."""

    kind: int
    gated: bool
    alpha: float
    limit: float


@dataclass(frozen=True)
class Router(Generic[T]):
    """How experts are chosen; see :func:`cpumoe.ops.select_experts`. ``in_fp32``: logits are not rounded."""

    weight: Matrix[T]
    topk: int
    scoring: int
    score_chosen: bool
    renormalize: bool
    correction_bias: T | None
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
    """Dispatch mode: the ranks that compute the rows of a rank."""

    STAY = 0  #: every rank computes all rows, which it has already
    TO_ALL = 1  #: all ranks
    TO_EXPERTS = 2  #: those with one of the row's experts


@dataclass(frozen=True, kw_only=True)
class PackedExperts(Generic[T]):
    """The packed experts of a layer and the ranks that have them.

    Attributes:
        gate_up, down: packed; None where experts are spread over ranks and none of them is here.
        spread: each rank has some experts or a slice of all of them, and their sums are added.
        copies: where they are; None for slices of all of them.
        loads: int64 [experts], in which it is counted how often each is chosen; None: it is not.
        travel: where rows go, if ranks do not have the same ones.
        prepared_rows: they travel as the first product wants them; all ranks have some experts then.
    """

    gate_up: T | None
    down: T | None
    activation: Activation
    weight_on_input: bool = False
    spread: bool = False
    copies: Copies | None = None
    loads: T | None = None
    travel: Travel = Travel.STAY
    prepared_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(PackedExperts[T]):
    """Packed experts and their router."""

    router: Router[T]


@dataclass(frozen=True)
class DenseBlock(Generic[T]):
    """A feed-forward block that all tokens take.

    Attributes:
        gate: [I, H]; without it ``up`` is [2 * I, H], gate first, unless the activation is not gated.
        up: [I, H]. down: [H, I].
        share: [1, H]: its result times the sigmoid of that product.
    """

    gate: Matrix[T] | None
    up: Matrix[T]
    down: Matrix[T]
    activation: Activation
    share: Matrix[T] | None = None


@dataclass(frozen=True)
class Layer(Generic[T]):
    """One layer: norms around mixer and block, each of which is added to the residual stream."""

    mixer: Mixer[T]
    experts: RoutedExperts[T] | None
    dense: DenseBlock[T] | None
    before_mixer: Norm[T] | None = None
    after_mixer: Norm[T] | None = None
    before_block: Norm[T] | None = None
    after_block: Norm[T] | None = None
    residual_factor: float = 1.0


@dataclass(frozen=True)
class DecoderModel(Generic[T]):
    """All of a decoder. ``embedding`` [vocabulary, H] of the dtype of hidden states, ``head`` or None.

    ``exchange`` is of the ranks that experts are spread over, ``group`` of those that columns and heads are spread
    over: some of the former, with the same rows. Other groups have rows of their own.
    """

    embedding: T
    embedding_factor: float
    rope: tuple[RopeTable[T], ...]
    layers: tuple[Layer[T], ...]
    norm: Norm[T] | None
    head: Matrix[T] | None
    exchange: RankExchange | None = None
    group: RankExchange | None = None
