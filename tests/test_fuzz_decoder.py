"""Steps of a decoder through the seam: any description and any rows compute or raise, and never crash.

Like test_fuzz_seam.py it needs NumPy only and runs under the sanitizers in CI.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz_seam import EXAMPLES, ISAS, Format, core, packed

HIDDEN, VOCABULARY, EXPERTS, INNER, POSITIONS = 64, 40, 4, 32, 64


def matrix(rng: np.random.Generator, rows: int, columns: int, dtype: Any, *, is_packed: bool = False) -> Any:
    if is_packed:
        blob = packed(rng, Format("int8", 0), 1, rows, columns, gated=False, bias=False)
        return SimpleNamespace(weight=blob, bias=None, ranks=1)
    weight = (rng.standard_normal((rows, columns)) * 0.1).astype(dtype)
    bias = rng.standard_normal(rows).astype(np.float32) if rows % 3 else None
    return SimpleNamespace(weight=weight, bias=bias, ranks=1)


def norm(rng: np.random.Generator, width: int) -> Any:
    weight = rng.standard_normal(width).astype(np.float32)
    return SimpleNamespace(weight=weight, epsilon=1e-6, round_first=bool(width % 2), plus_one=width % 3 == 0)


class Gqa(SimpleNamespace):
    """The core knows a mixer by the name of its class."""


class Mla(SimpleNamespace):
    pass


class DeltaNet(SimpleNamespace):
    pass


class ShortConv(SimpleNamespace):
    pass


SILU = SimpleNamespace(kind=0, gated=True, alpha=1.702, limit=7.0)


def attention(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    heads, kv_heads, head_dim, value_dim = shape["heads"], shape["kv_heads"], shape["depth"], shape["value_depth"]
    is_packed = shape["is_packed"]
    common = {
        "heads": heads,
        "value_dim": value_dim,
        "scale": 0.3,
        "window": shape["window"],
        "sinks": rng.standard_normal(heads).astype(np.float32) if shape["window"] % 2 else None,
        "query_factors": np.linspace(1, 2, POSITIONS).astype(np.float32) if shape["norms"] == 0 else None,
        "softcap": 5.0 if shape["window"] == 3 else 0.0,
        "gate": matrix(rng, heads, HIDDEN, dtype) if shape["norms"] == 1 else None,
        "out": matrix(rng, HIDDEN, heads * value_dim, dtype, is_packed=is_packed),
        "ranks": 1,
    }
    if shape["rank"]:
        nope = head_dim - 4
        return Mla(
            **common,
            query=matrix(rng, heads * head_dim, HIDDEN, dtype),
            rope=SimpleNamespace(table=-1, interleaved=head_dim == 8, separated=head_dim == 16),
            query_down=None,
            query_down_norm=None,
            latent=matrix(rng, shape["rank"] + 4, HIDDEN, dtype),
            latent_norm=norm(rng, shape["rank"]),
            expansion=rng.standard_normal((heads * (nope + value_dim), shape["rank"])).astype(dtype),
            kv_lora_rank=shape["rank"],
            nope_dim=nope,
            rope_dim=4,
        )
    gated_queries = shape["norms"] == 2 and value_dim == head_dim
    width = head_dim * (2 if gated_queries else 1)
    return Gqa(
        **common,
        query=matrix(rng, heads * width, HIDDEN, dtype, is_packed=is_packed),
        key=matrix(rng, kv_heads * head_dim, HIDDEN, dtype, is_packed=is_packed),
        value=matrix(rng, kv_heads * value_dim, HIDDEN, dtype),
        rope=SimpleNamespace(table=shape["rotary"], interleaved=head_dim == 8, separated=head_dim == 16),
        kv_heads=kv_heads,
        head_dim=head_dim,
        gated_queries=gated_queries,
        value_factor=1.0,
        query_norm=norm(rng, head_dim) if shape["norms"] else None,
        key_norm=norm(rng, head_dim) if shape["norms"] else None,
        norms_whole_rows=False,
        norms_after_rope=shape["norms"] == 2,
    )


def delta_net(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    """Queries, keys, values and betas of one linear; gates and decays of another, or of what a third makes smaller."""
    key_heads, heads, dk, dv = shape["kv_heads"], shape["heads"], shape["depth"], shape["value_depth"]
    channels, of_channels = 2 * key_heads * dk + heads * dv, shape["norms"] == 1
    first, second = channels + heads, heads * dv + heads * (dk if of_channels else 1)
    projections = [matrix(rng, first, HIDDEN, dtype, is_packed=shape["is_packed"])]
    projections.append(matrix(rng, 5 if of_channels else second, HIDDEN, dtype))
    expanded = SimpleNamespace(matrix=matrix(rng, second, 5, dtype), first=first)
    behind = first + 5 if of_channels else first

    def columns(begin: int, stride: int) -> Any:
        return SimpleNamespace(first=begin, group=1, group_stride=stride, head_stride=0)

    return DeltaNet(
        projections=tuple(projections),
        expansions=(expanded,) if of_channels else (),
        queries=columns(0, dk),
        keys=columns(key_heads * dk, dk),
        values=columns(2 * key_heads * dk, dv),
        betas=columns(channels, 1),
        gates=columns(behind, dv),
        decays=columns(behind + heads * dv, dk if of_channels else 1),
        key_heads=key_heads,
        heads=heads,
        key_dim=dk,
        value_dim=dv,
        log_rates=rng.standard_normal(heads).astype(np.float32),
        decay_bias=rng.standard_normal(heads * (dk if of_channels else 1)).astype(dtype),
        decay_bound=-5.0 if shape["window"] == 2 else 0.0,
        conv_weight=rng.standard_normal((channels, 1 + shape["window"])).astype(dtype),
        conv_bias=rng.standard_normal(channels).astype(dtype) if shape["window"] % 2 else None,
        norm_weight=rng.standard_normal(dv).astype(dtype),
        norm_epsilon=1e-6,
        sigmoid_gate=shape["window"] > 3,
        out=matrix(rng, HIDDEN, heads * dv, dtype),
    )


def short_conv(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    channels = 3 * shape["depth"]
    return ShortConv(
        projection=matrix(rng, 3 * channels, HIDDEN, dtype),  # three of its numbers are multiplied: small ones
        out=matrix(rng, HIDDEN, channels, dtype),
        conv_weight=rng.standard_normal((channels, 1 + shape["window"])).astype(dtype),
        conv_bias=rng.standard_normal(channels).astype(dtype) if shape["window"] % 2 else None,
    )


def mixer(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    if not shape["delta"]:
        return attention(rng, shape, dtype)
    return delta_net(rng, shape, dtype) if shape["block"] else short_conv(rng, shape, dtype)


def layer(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    router = SimpleNamespace(
        weight=matrix(rng, EXPERTS, HIDDEN, dtype),
        topk=2,
        scoring=1,
        score_chosen=False,
        renormalize=True,
        correction_bias=None,
        groups=0,
        topk_groups=0,
        scale=1.0,
        in_fp32=bool(shape["heads"] % 2),
    )
    experts = SimpleNamespace(
        router=router,
        gate_up=packed(rng, Format("int4", 32), EXPERTS, 2 * INNER, HIDDEN, gated=True, bias=False),
        down=packed(rng, Format("int4", 32), EXPERTS, HIDDEN, INNER, gated=False, bias=False),
        activation=SILU,
        weight_on_input=False,
        spread=False,
        copies=None,
        travel=0,
        prepared_rows=False,
        loads=np.zeros(EXPERTS, np.int64) if shape["heads"] % 4 else None,
    )
    dense = SimpleNamespace(
        gate=matrix(rng, INNER, HIDDEN, dtype),
        up=matrix(rng, INNER, HIDDEN, dtype),
        down=matrix(rng, HIDDEN, INNER, dtype),
        activation=SILU,
        share=matrix(rng, 1, HIDDEN, dtype) if shape["block"] == 2 else None,
    )
    return SimpleNamespace(
        mixer=mixer(rng, shape, dtype),
        experts=experts if shape["block"] else None,
        dense=dense if shape["block"] != 1 else None,
        before_mixer=norm(rng, HIDDEN),
        after_mixer=norm(rng, HIDDEN) if shape["block"] == 2 else None,
        before_block=norm(rng, HIDDEN),
        after_block=None,
        residual_factor=0.5,
    )


def described(rng: np.random.Generator, shapes: list[dict[str, Any]], dtype: Any) -> Any:
    width = 4
    angles = rng.standard_normal((POSITIONS, width))
    table = SimpleNamespace(cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32))
    return SimpleNamespace(
        embedding=rng.standard_normal((VOCABULARY, HIDDEN)).astype(dtype),
        embedding_factor=1.5,
        rope=(table,),
        layers=tuple(layer(rng, shape, dtype) for shape in shapes),
        norm=norm(rng, HIDDEN),
        head=matrix(rng, VOCABULARY, HIDDEN, dtype, is_packed=shapes[0]["is_packed"]),
        exchange=None,
        group=None,
    )


SHAPES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([2, 4, 6]),
        "kv_heads": st.sampled_from([1, 2]),
        "depth": st.sampled_from([5, 8, 16]),
        "value_depth": st.sampled_from([3, 8, 16]),
        "rank": st.sampled_from([0, 0, 12]),
        "rotary": st.sampled_from([-1, 0]),
        "window": st.integers(0, 5),
        "norms": st.integers(0, 2),
        "block": st.integers(0, 2),
        "is_packed": st.booleans(),
        "delta": st.sampled_from([False, False, True]),
    }
)


def cached_parts(part: Any) -> list[tuple[int, int]]:
    """Heads and values of each tensor that attention keeps of a token."""
    if isinstance(part, Mla):
        return [(1, part.kv_lora_rank + part.rope_dim)]
    return [(part.kv_heads, part.head_dim), (part.kv_heads, part.value_dim)]


def new_cache(part: Any, batch: int, sizes: tuple[int, int], dtype: Any, records: bool, first: int | None = 0) -> Any:
    """The cache of a mixer: keys and values, or latents, with their first place, if any; or states.

    ``sizes``: sequences or pages, and their tokens.
    """
    if isinstance(part, DeltaNet):
        state = np.zeros((batch, part.heads, part.key_dim, part.value_dim), np.float32)
        return np.zeros((batch, *part.conv_weight.shape), dtype), state
    if isinstance(part, ShortConv):
        return (np.zeros((batch, *part.conv_weight.shape), dtype),)
    count, tokens = sizes

    def empty(heads: int, dim: int) -> Any:
        if records:  # scales that are NaN
            return np.full((count, heads, tokens, core.cache_record_bytes(dim)), -1, np.int8)
        return np.full((count, heads, tokens, dim), np.nan, dtype)

    held = [empty(*sizes_of_part) for sizes_of_part in cached_parts(part)]
    return (*held,) if first is None else (*held, first)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    batch=st.integers(0, 3),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    half=st.booleans(),
    records=st.booleans(),
    page_tokens=st.sampled_from([16, 32]),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_have_the_same_bits_everywhere_and_in_pages(
    shapes: list[dict[str, Any]],
    batch: int,
    counts: list[int],
    half: bool,
    records: bool,
    page_tokens: int,
    isa: str,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    dtype = np.float16 if half else np.float32
    model = described(rng, shapes, dtype)
    tokens = rng.integers(0, VOCABULARY, (batch, sum(counts)))
    results = []
    for name, team in (("scalar", 1), (isa, threads)):
        core.use_isa(name)
        core.set_thread_count(team)
        try:
            decoder = core.Decoder(model)
            room = sum(counts) + 2
            caches = [new_cache(part.mixer, batch, (batch, room), dtype, records) for part in model.layers]
            parts, past = [], 0
            for count in counts:
                out = np.zeros((batch, count, VOCABULARY), dtype)
                piece = np.ascontiguousarray(tokens[:, past : past + count])
                decoder.step(piece, caches, past, None, None, count, None, out)
                parts.append(out)
                past += count
            results.append(np.concatenate(parts, 1))
        finally:
            core.use_isa("")
            core.set_thread_count(0)
    assert np.array_equal(*results, equal_nan=True)
    assert batch == 0 or np.isfinite(results[0]).all()
    # The same in pages that lie anywhere, all rows at once.
    total, per = sum(counts), -(-sum(counts) // page_tokens)
    pages = rng.permutation(batch * per).astype(np.int32).reshape(batch, per)
    pools = [new_cache(part.mixer, batch, (batch * per, page_tokens), dtype, records, None) for part in model.layers]
    out = np.zeros((batch * total, VOCABULARY), dtype)
    core.Decoder(model).step_rows(
        np.ascontiguousarray(tokens.reshape(-1)),
        np.repeat(np.arange(batch), total),
        np.tile(np.arange(total), batch),
        pages,
        page_tokens,
        pools,
        np.arange(batch * total),
        out,
    )
    assert np.array_equal(out.reshape(results[0].shape), results[0], equal_nan=True)


DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["token", "past", "position", "padding", "cache", "first place", "dtype", "width", "kept", "out", "caches"]
        ),
        st.integers(-3, 70),
    ),
    max_size=2,
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=SHAPES, damages=DAMAGES, records=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_bad_rows_and_caches_are_refused(
    shape: dict[str, Any], damages: list[tuple[str, int]], records: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = described(rng, [shape, shape], np.float32)
    decoder = core.Decoder(model)
    batch, count, room, past, kept, first = 2, 3, 8, 0, 3, 0
    tokens = rng.integers(0, VOCABULARY, (batch, count))
    positions: Any = None
    padding: Any = None
    part = model.layers[0].mixer
    sizes: list[int] = [batch, 0 if shape["delta"] else cached_parts(part)[0][0], room]
    dtype: Any = np.int8 if records else np.float32
    layers, out_rows, more_bytes = 2, batch, 0
    for what, number in damages:
        if what == "token":
            tokens[1, 2] = number
        elif what == "past":
            past = number
        elif what == "position":
            positions = np.full((batch, count), number)
        elif what == "padding":
            padding = np.array([number, 0])
        elif what == "cache":
            sizes[number % 3] = max(number, 0)
        elif what == "first place":
            first = number
        elif what == "dtype":
            dtype = [np.float16, np.float64, np.int32, np.int8, np.uint8][number % 5]
        elif what == "width":
            more_bytes = number
        elif what == "kept":
            kept = number
        elif what == "out":
            out_rows = max(number, 0)
        elif what == "caches":
            layers = max(number % 5, 0)
    if shape["delta"]:
        held = np.float32 if dtype is np.int8 else dtype  # states are never records
        caches = [new_cache(part, sizes[0], (0, 0), held, records) for _ in range(layers)]
    else:
        widths = [core.cache_record_bytes(dim) if records else dim for _, dim in cached_parts(part)]
        caches = [
            (*(np.zeros((*sizes, max(width + more_bytes, 0)), dtype) for width in widths), first) for _ in range(layers)
        ]
    out = np.zeros((out_rows, min(max(kept, 0), count), VOCABULARY), np.float32)
    try:
        decoder.step(tokens, caches, past, positions, padding, kept, None, out)
    except (ValueError, TypeError) as problem:
        assert damages and str(problem)
    else:
        assert np.isfinite(out).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numbers=st.lists(st.integers(-2, 40), min_size=12, max_size=12),
    page_tokens=st.sampled_from([0, 3, 16, 32, -16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bad_pages_are_refused(numbers: list[int], page_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = dict.fromkeys(("rank", "window", "norms", "is_packed", "delta"), 0) | {
        "heads": 2,
        "kv_heads": 1,
        "block": 1,
    }
    model = described(rng, [shape | {"depth": 8, "value_depth": 8, "rotary": 0}], np.float32)
    pools = [tuple(np.zeros((4, 1, 16, 8), np.float32) for _ in range(2))]
    rows, out = 3, np.zeros((2, VOCABULARY), np.float32)
    arrays = [np.array(numbers[i : i + rows]) for i in (0, 3, 6)]
    pages = np.array(numbers[8:12], np.int32).reshape(2, 2)
    try:
        core.Decoder(model).step_rows(*arrays, pages, page_tokens, pools, np.array(numbers[6:8]), out)
    except (ValueError, TypeError) as problem:
        assert str(problem)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=SHAPES,
    part=st.sampled_from(["query", "key", "out", "heads", "kv_heads", "head_dim", "window", "table", "sinks", "norm"]),
    number=st.integers(-2, 300),
)
def test_parts_that_do_not_belong_together_are_refused(shape: dict[str, Any], part: str, number: int) -> None:
    rng = np.random.default_rng(0)
    model = described(rng, [shape | {"delta": False}], np.float32)
    attention_part = model.layers[0].mixer
    if part in ("query", "key", "out"):
        setattr(attention_part, part, matrix(rng, max(number, 1), HIDDEN, np.float32))
    elif part == "sinks":
        attention_part.sinks = np.zeros(max(number, 0), np.float32)
    elif part == "norm":
        model.layers[0].before_block = norm(rng, max(number, 1))
    elif part == "table":
        attention_part.rope.table = number
    else:
        setattr(attention_part, part, number)
    try:
        decoder = core.Decoder(model)
    except (ValueError, TypeError) as problem:
        assert str(problem)
    else:  # it was nothing that matters
        caches = [(*(np.zeros((1, heads, 4, dim), np.float32) for heads, dim in cached_parts(attention_part)), 0)]
        decoder.step(np.array([[1, 2]]), caches, 0, None, None, 2, np.zeros((1, 2, HIDDEN), np.float32), None)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=SHAPES,
    part=st.sampled_from(
        ["heads", "key_heads", "key_dim", "value_dim", "conv", "bias", "columns", "expansion", "rates", "state"]
    ),
    number=st.integers(-2, 300),
)
def test_rules_and_states_that_do_not_fit_are_refused(shape: dict[str, Any], part: str, number: int) -> None:
    rng = np.random.default_rng(0)
    model = described(rng, [shape | {"delta": True, "block": 1}], np.float32)
    rule, count = model.layers[0].mixer, max(number, 0)
    caches = [new_cache(rule, 1, (0, 0), np.float32, records=False)]
    if part == "conv":
        rule.conv_weight = np.zeros((len(rule.conv_weight), count), np.float32)
    elif part == "bias":
        rule.decay_bias = np.zeros(count, np.float32)
    elif part == "columns":
        rule.values.group_stride = rule.decays.first = number
    elif part == "expansion":
        rule.expansions = (SimpleNamespace(matrix=matrix(rng, 3, max(number, 1), np.float32), first=number),)
    elif part == "rates":
        rule.log_rates = np.zeros(count, np.float32)
    elif part == "state":
        caches = [(np.zeros((1, count, 2), np.float32), caches[0][1])]
    else:
        setattr(rule, part, number)
    try:
        decoder = core.Decoder(model)
        decoder.step(np.array([[1, 2]]), caches, 0, None, None, 2, np.zeros((1, 2, HIDDEN), np.float32), None)
    except (ValueError, TypeError) as problem:
        assert str(problem)


def test_what_no_decoder_has() -> None:
    for model in (None, 3, SimpleNamespace(), SimpleNamespace(embedding=np.zeros((3, 4)))):
        with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
            core.Decoder(model)


EMPTY = np.zeros(0, np.float32)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.layers[0].mixer, "sinks", EMPTY),
        lambda m: setattr(m.layers[0].mixer, "query_factors", EMPTY),
        lambda m: setattr(m.layers[0].mixer, "scale", None),
        lambda m: setattr(m.layers[0].mixer, "rope", None),
        lambda m: setattr(m.layers[0].experts.router, "correction_bias", EMPTY),
        lambda m: setattr(m.layers[0].experts, "loads", np.zeros(0, np.int64)),
        lambda m: setattr(m.layers[0].before_block, "weight", EMPTY),
        lambda m: setattr(m.layers[0].before_block, "epsilon", None),
        lambda m: setattr(m.layers[0], "residual_factor", None),
        lambda m: setattr(m, "layers", None),
        lambda m: setattr(m, "layers", ()),
        lambda m: setattr(m, "layers", (None,)),
        lambda m: setattr(m, "rope", None),
    ],
)
def test_absent_and_empty_values_are_not_defaults(change: Any) -> None:
    shape = {"heads": 2, "kv_heads": 1, "depth": 8, "value_depth": 8, "rotary": 0, "block": 1}
    shape |= dict.fromkeys(("rank", "window", "norms", "is_packed", "delta"), 0)
    model = described(np.random.default_rng(0), [shape], np.float32)
    core.Decoder(model)
    change(model)
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        core.Decoder(model)
