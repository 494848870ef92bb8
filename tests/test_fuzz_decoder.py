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


SILU = SimpleNamespace(kind=0, gated=True, alpha=1.702, limit=7.0)


def attention(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    heads, kv_heads, depth, value_depth = shape["heads"], shape["kv_heads"], shape["depth"], shape["value_depth"]
    common = {
        "heads": heads,
        "depth": depth,
        "value_depth": value_depth,
        "scale": 0.3,
        "norms_whole_rows": False,
        "norms_after_rotary": shape["norms"] == 2,
        "rotary": shape["rotary"],
        "interleaved": depth == 8,
        "separated": depth == 16,
        "window": shape["window"],
        "sinks": rng.standard_normal(heads).astype(np.float32) if shape["window"] % 2 else None,
        "query_factors": np.linspace(1, 2, POSITIONS).astype(np.float32) if shape["norms"] == 0 else None,
        "softcap": 5.0 if shape["window"] == 3 else 0.0,
        "value_factor": 1.0,
        "gate": matrix(rng, heads, HIDDEN, dtype) if shape["norms"] == 1 else None,
        "gated_queries": False,
        "out": matrix(rng, HIDDEN, heads * value_depth, dtype, is_packed=shape["is_packed"]),
        "query_norm": None,
        "key_norm": None,
        "key": None,
        "value": None,
        "latent": None,
        "kv_heads": kv_heads,
        "ranks": 1,
    }
    if shape["rank"]:
        nope = depth - 4
        common |= {"kv_heads": 1, "query": matrix(rng, heads * depth, HIDDEN, dtype), "rotary": -1}
        common["latent"] = SimpleNamespace(
            down=None,
            down_norm=None,
            latent=matrix(rng, shape["rank"] + 4, HIDDEN, dtype),
            latent_norm=norm(rng, shape["rank"]),
            expansion=rng.standard_normal((heads * (nope + value_depth), shape["rank"])).astype(dtype),
            rank=shape["rank"],
            nope=nope,
            rotated=4,
        )
        return SimpleNamespace(**common)
    if shape["norms"]:
        common |= {"query_norm": norm(rng, depth), "key_norm": norm(rng, depth)}
    is_packed = shape["is_packed"]
    common["gated_queries"] = shape["norms"] == 2 and value_depth == depth
    width = depth * (2 if common["gated_queries"] else 1)
    return SimpleNamespace(
        **common
        | {
            "query": matrix(rng, heads * width, HIDDEN, dtype, is_packed=is_packed),
            "key": matrix(rng, kv_heads * depth, HIDDEN, dtype, is_packed=is_packed),
            "value": matrix(rng, kv_heads * value_depth, HIDDEN, dtype),
        }
    )


def delta_rule(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
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

    return SimpleNamespace(
        projections=tuple(projections),
        expansions=(expanded,) if of_channels else (),
        columns=SimpleNamespace(
            queries=columns(0, dk),
            keys=columns(key_heads * dk, dk),
            values=columns(2 * key_heads * dk, dv),
            betas=columns(channels, 1),
            gates=columns(behind, dv),
            decays=columns(behind + heads * dv, dk if of_channels else 1),
        ),
        key_heads=key_heads,
        heads=heads,
        key_depth=dk,
        value_depth=dv,
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


def convolution(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    channels = 3 * shape["depth"]
    return SimpleNamespace(
        projection=matrix(rng, 3 * channels, HIDDEN, dtype),  # three of its numbers are multiplied: small ones
        out=matrix(rng, HIDDEN, channels, dtype),
        conv_weight=rng.standard_normal((channels, 1 + shape["window"])).astype(dtype),
        conv_bias=rng.standard_normal(channels).astype(dtype) if shape["window"] % 2 else None,
    )


def layer(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> Any:
    router = SimpleNamespace(
        weight=matrix(rng, EXPERTS, HIDDEN, dtype),
        topk=2,
        scoring=1,
        score_chosen=False,
        renormalize=True,
        correction=None,
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
        attention=None if shape["delta"] else attention(rng, shape, dtype),
        delta=delta_rule(rng, shape, dtype) if shape["delta"] and shape["block"] else None,
        convolution=convolution(rng, shape, dtype) if shape["delta"] and not shape["block"] else None,
        experts=experts if shape["block"] else None,
        dense=dense if shape["block"] != 1 else None,
        before_attention=norm(rng, HIDDEN),
        after_attention=norm(rng, HIDDEN) if shape["block"] == 2 else None,
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
        rotary=(table,),
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


def depths_of(part: Any) -> tuple[int, int]:
    if part.latent is not None:
        return part.latent.rank + 4, part.latent.rank + 4
    return part.depth, part.value_depth


def new_cache(part: Any, batch: int, sizes: tuple[int, int], dtype: Any, records: bool, first: int | None = 0) -> Any:
    """What a layer keeps: keys and values [B, heads, tokens, depth] with their first place, if any, or states.

    ``sizes``: sequences or pages, and their tokens.
    """
    if (rule := part.delta) is not None:
        channels, taps = rule.conv_weight.shape
        state = np.zeros((batch, rule.heads, rule.key_depth, rule.value_depth), np.float32)
        return np.zeros((batch, channels, taps), dtype), state
    if part.convolution is not None:
        return (np.zeros((batch, *part.convolution.conv_weight.shape), dtype),)
    count, tokens = sizes
    heads = part.attention.kv_heads

    def empty(depth: int) -> Any:
        if records:  # scales that are NaN
            return np.full((count, heads, tokens, core.cache_record_bytes(depth)), -1, np.int8)
        return np.full((count, heads, tokens, depth), np.nan, dtype)

    both = (empty(depth) for depth in depths_of(part.attention))
    return (*both,) if first is None else (*both, first)


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
            caches = [new_cache(part, batch, (batch, room), dtype, records) for part in model.layers]
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
    pools = [new_cache(part, batch, (batch * per, page_tokens), dtype, records, None) for part in model.layers]
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
    sizes: list[int] = [batch, 0 if shape["delta"] else model.layers[0].attention.kv_heads, room]
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
        caches = [new_cache(model.layers[0], sizes[0], (0, 0), held, records) for _ in range(layers)]
    else:
        depths = depths_of(model.layers[0].attention)
        widths = [core.cache_record_bytes(depth) if records else depth for depth in depths]
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
    part=st.sampled_from(["query", "key", "out", "heads", "kv_heads", "depth", "window", "rotary", "sinks", "norm"]),
    number=st.integers(-2, 300),
)
def test_parts_that_do_not_belong_together_are_refused(shape: dict[str, Any], part: str, number: int) -> None:
    rng = np.random.default_rng(0)
    model = described(rng, [shape | {"delta": False}], np.float32)
    attention_part = model.layers[0].attention
    if part in ("query", "key", "out"):
        setattr(attention_part, part, matrix(rng, max(number, 1), HIDDEN, np.float32))
    elif part == "sinks":
        attention_part.sinks = np.zeros(max(number, 0), np.float32)
    elif part == "norm":
        model.layers[0].before_block = norm(rng, max(number, 1))
    else:
        setattr(attention_part, part, number)
    try:
        decoder = core.Decoder(model)
    except (ValueError, TypeError) as problem:
        assert str(problem)
    else:  # it was nothing that matters
        depths = depths_of(attention_part)
        caches = [(*(np.zeros((1, attention_part.kv_heads, 4, depth), np.float32) for depth in depths), 0)]
        decoder.step(np.array([[1, 2]]), caches, 0, None, None, 2, np.zeros((1, 2, HIDDEN), np.float32), None)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=SHAPES,
    part=st.sampled_from(
        ["heads", "key_heads", "key_depth", "value_depth", "conv", "bias", "columns", "expansion", "rates", "state"]
    ),
    number=st.integers(-2, 300),
)
def test_rules_and_states_that_do_not_fit_are_refused(shape: dict[str, Any], part: str, number: int) -> None:
    rng = np.random.default_rng(0)
    model = described(rng, [shape | {"delta": True, "block": 1}], np.float32)
    rule, count = model.layers[0].delta, max(number, 0)
    caches = [new_cache(model.layers[0], 1, (0, 0), np.float32, records=False)]
    if part == "conv":
        rule.conv_weight = np.zeros((len(rule.conv_weight), count), np.float32)
    elif part == "bias":
        rule.decay_bias = np.zeros(count, np.float32)
    elif part == "columns":
        rule.columns.values.group_stride = rule.columns.decays.first = number
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
