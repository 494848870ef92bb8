"""Random decoders and steps through the seam: each computes, or raises an error that names a field; none crashes.

Models are generated from the fields that core/decoder/schema.h lists. Fields are drawn at random; where the core
rejects a model, the fields that the error names are drawn again, with the shape that it accepts. So a new field or
mixer is fuzzed without a line here, if its errors can be followed. Like test_fuzz_seam.py this needs NumPy only and
runs under the sanitizers in CI.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz_seam import EXAMPLES, ISAS, Format, core, packed, shifted

FIELDS = core.decoder_fields()
MATRIX = {"weight": ("Tensor", False), "bias": ("float32", True), "ranks": ("int of 32 bits", False)}
LAYER = FIELDS["layers"][0][0]
MIXERS = LAYER["mixer"][0]
POSITIONS = 64  # first dimension of all arrays, until the core asks for another one
WIDTHS = (2, 16, 32)
EXPERTS = 4
INT4 = Format("int4", 0)
ROUTING_NAMES = {"num_expert_group": "groups", "topk_group": "topk_groups"}  # as errors of the operator call them
DTYPES = {0: np.float32, 2: np.float16}  # by their numbers in the core; NumPy has no bf16


@functools.cache
def packed_matrix(experts: int, rows: int, columns: int, gated: bool = False, kind: Format = INT4) -> Any:
    blob = packed(np.random.default_rng(0), kind, experts, rows, columns, gated=gated, bias=False)
    blob.flags.writeable = False
    return blob


def is_variant(kind: Any) -> bool:
    return isinstance(kind, dict) and all(isinstance(each, dict) for each in kind.values())


class Stuck(Exception):
    """A model that mending does not lead to one that is accepted."""


class Models:
    """Draws models whose fields fit together."""

    def __init__(self, seed: int, mixers: list[str] | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.mixers = mixers or list(MIXERS)

    def one_of(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def format_for(self, columns: int) -> Format:
        return self.one_of((Format("int4", 0), Format("int8", 0), Format("int4", 32))[: 2 + (columns % 32 == 0)])

    def field(self, kind: Any, may_be_none: bool, again: bool = False) -> Any:
        return None if may_be_none and self.rng.random() < (0.05 if again else 0.4) else self.draw(kind, again=again)

    def draw(self, kind: Any, shape: tuple[int, ...] | None = None, again: bool = False) -> Any:
        """A value of a kind of field; arrays in it have the shape, if any."""
        if is_variant(kind):
            name = self.one_of([each for each in kind if each in self.mixers])
            return type(name, (SimpleNamespace,), {})(**vars(self.draw(kind[name])))
        if isinstance(kind, dict):
            sized = {name for name, (of, _) in kind.items() if shape and isinstance(of, str) and of[0] not in "bi"}
            fields = {n: self.draw(k, shape) if n in sized else self.field(k, no) for n, (k, no) in kind.items()}
            # Rows of zeros have no norm without an epsilon, and no sum to be divided by.
            rescued = {n: value or 0.5 for n, value in fields.items() if "epsilon" in n or "embedding_factor" in n}
            return SimpleNamespace(**(fields | rescued))
        if isinstance(kind, list):
            return [self.draw(kind[0], shape) for _ in range(self.rng.integers(0 if again else 1, 4))]
        if isinstance(kind, int):
            return int(self.rng.integers(kind + 1))
        width = self.one_of(WIDTHS)
        if kind == "PackedMatrix":
            rows = self.one_of(WIDTHS)
            return packed_matrix(EXPERTS, rows, width, rows == 32 and self.rng.random() < 0.8, self.format_for(width))
        if kind == "Matrix":
            rows, columns = shape or (POSITIONS, width)
            if self.rng.random() < 0.3:
                weight = packed_matrix(1, rows, columns, kind=self.format_for(columns))
                return SimpleNamespace(weight=weight, bias=None, ranks=1)
            bias = self.one_of((None, self.draw("float32", (rows,))))
            return SimpleNamespace(weight=self.draw("Tensor", (rows, columns)), bias=bias, ranks=1)
        if kind == "Tensor":
            dtype = self.one_of(list(DTYPES.values()))
            return (self.rng.standard_normal(shape or (POSITIONS, width)) * 0.2).astype(dtype)
        if kind == "RankExchange":
            return alone()
        return {
            "bool": lambda: bool(self.rng.integers(2)),
            "int": lambda: self.one_of((0, 1, 1, 2, 2, 3, 4, 5, 8, 16)),
            "int of 32 bits": lambda: self.one_of((-1, 0, 0, 1, 1, 2)),
            "float": lambda: self.one_of((0.0, -2.0) if again else (0.0, 0.25, 0.5, 1.0)),
            "float32": lambda: (self.rng.standard_normal((shape or (POSITIONS,))[0]) * 0.2).astype(np.float32),
            "int32": lambda: np.arange((shape or (POSITIONS,))[0], dtype=np.int32) * self.one_of((0, 1)),
            "int64": lambda: np.zeros((shape or (POSITIONS,))[0], np.int64),
        }[kind]()

    def mend(self, model: Any, sentence: str, root: str) -> None:
        """Draws a field that an error names again; all of it must lie in a part of the model."""
        fields = list(walk(model, FIELDS))
        named = [[field for field in fields if is_named(field[0], token)] for token in tokens(sentence)]
        assert any(named), f"no field is named: {sentence}"
        named = [inside for each in named if (inside := [field for field in each if field[0].startswith(root)])]
        accepted = sentence.partition(";")[2]
        shapes = re.findall(r"\[([^\]]+)\]", accepted) or re.findall(r"^ (\d+) are accepted", accepted)
        if not named:
            model.layers = [self.draw(LAYER)]
            return
        _, holder, name, (kind, may_be_none) = self.one_of(named[0] if shapes else self.one_of(named))
        if shapes:
            sizes = self.one_of(shapes).split(", ")
            shape = tuple(int(size) if size.isdigit() else int(self.rng.integers(1, 6)) for size in sizes)
            setattr(holder, name, self.draw(kind, shape))
        elif isinstance(old := getattr(holder, name), np.ndarray) and old.dtype != np.uint8 and self.rng.random() < 0.7:
            setattr(holder, name, self.draw(kind, old.shape))
        else:
            setattr(holder, name, self.field(kind, may_be_none, again=True))

    def fitting(self, model: Any, root: str = "") -> Any:
        for _ in range(300):
            try:
                core.Decoder(model)
                return model
            except ValueError as problem:
                sentence = str(problem)
                self.mend(model, sentence, root)
        raise Stuck(sentence)

    def model(self, layers: int = 1) -> Any:
        for _ in range(200):
            try:
                return self.whole_model(layers)
            except Stuck as problem:
                last = problem
        raise AssertionError(f"no model was found that is accepted; the last one: {last}")

    def whole_model(self, layers: int) -> Any:
        model = self.draw(FIELDS)
        model.layers = [self.draw(LAYER)]
        model = self.fitting(model)
        found = list(model.layers)
        for _ in range(50):
            if len(found) < layers:
                model.layers = [self.draw(LAYER)]
                with suppress(Stuck):
                    found += self.fitting(model, "layers").layers
        if len(found) < layers:
            raise Stuck("a further layer")
        model.layers = found[:layers]
        return model


def names_in(kind: Any) -> set[tuple[str, bool]]:
    """The names of all fields of a struct and of those in it, and whether they may be None."""
    if not isinstance(kind, dict):
        return names_in(kind[0]) if isinstance(kind, list | tuple) else set()
    own = set() if is_variant(kind) else {(name, may_be_none) for name, (_, may_be_none) in kind.items()}
    return own.union(*(names_in(field) for field in kind.values()))


NAMES = {name for name, _ in names_in(FIELDS) | names_in(MATRIX)}
REQUIRED = NAMES - {name for name, may_be_none in names_in(FIELDS) | names_in(MATRIX) if may_be_none}


def alone() -> Any:
    """An exchange of one rank."""

    def copied(mine: Any, _: Any, every: Any, *__: Any) -> None:
        every[:] = mine

    return core.CarriedExchange(0, 1, copied, copied, lambda _: None, lambda _: None)


def walk(value: Any, kind: Any, path: str = "") -> Iterator[tuple[str, Any, str, tuple[Any, bool]]]:
    """All fields of a struct and those in it: path, holder, name, (kind, may be None)."""
    if is_variant(kind):
        kind = kind[type(value).__name__]
    for name, field in kind.items():
        yield path + name, value, name, field
        found, of = getattr(value, name), field[0]
        items, of = (found, of[0]) if isinstance(of, list) else ([found], of)
        for index, item in enumerate(items if isinstance(of, dict) else ()):
            if item is not None:
                yield from walk(item, of, f"{path}{name}{f'[{index}]' if items is found else ''}.")


def tokens(sentence: str) -> list[str]:
    """The words of an error that may be fields."""
    sentence = re.sub(r"num_expert_group|topk_group\b", lambda m: ROUTING_NAMES[m[0]], sentence)
    return re.findall(r"[a-z_]+[0-9]*(?:\[\d+\])?(?:\.[a-z_]+[0-9]*(?:\[\d+\])?)*", sentence)


def is_named(path: str, token: str) -> bool:
    """Whether a token is the end of a path, with or without its indices."""
    if path.rpartition(".")[2] != token.rpartition(".")[2]:
        return False
    return f".{path}".endswith("." + token) or re.sub(r"\[\d+\]", "", f".{path}").endswith("." + token)


def new_caches(
    decoder: Any, batch: int, sizes: tuple[int, int], records: bool, first: bool = True, fill: Any = 0
) -> Any:
    """The caches of all layers, filled with NaN or -1. ``sizes``: sequences or pages, and their tokens."""

    def part(per_token: bool, shape: list[int], dtype: int, may_be_int8: bool) -> Any:
        if not per_token:
            return np.zeros((batch, *shape), DTYPES[dtype])
        if records and may_be_int8:
            width = core.cache_record_bytes(shape[1])
            return np.full((sizes[0], shape[0], sizes[1], width), -1 if fill else 0, np.int8)
        return np.full((sizes[0], shape[0], sizes[1], shape[1]), fill, DTYPES[dtype])

    layouts = decoder.cache_layouts()
    places = [(0,) if first and any(per_token for _, per_token, *_ in layout) else () for layout in layouts]
    return [(*(part(*each[1:]) for each in layout), *place) for layout, place in zip(layouts, places, strict=True)]


def result_of(model: Any, *shape: int) -> dict[str, Any]:
    """The array that a step writes to: logits if there is a head."""
    dtype = model.embedding.dtype
    if model.head is None:
        return {"hidden_out": np.zeros((*shape, model.embedding.shape[1]), dtype), "logits_out": None}
    return {"hidden_out": None, "logits_out": np.zeros((*shape, core.Decoder(model).vocabulary), dtype)}


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 3),
    batch=st.integers(0, 3),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    records=st.booleans(),
    page_tokens=st.sampled_from([16, 32]),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_steps_have_the_same_bits_everywhere_and_in_pages(
    seed: int, layers: int, batch: int, counts: list[int], records: bool, page_tokens: int, isa: str, threads: int
) -> None:
    model, rng = Models(seed).model(layers), np.random.default_rng(seed)
    ids = rng.integers(0, len(model.embedding), (batch, sum(counts)))
    results = []
    for name, team in (("scalar", 1), (isa, threads)):
        core.use_isa(name)
        core.set_thread_count(team)
        try:
            decoder = core.Decoder(model)
            caches = new_caches(decoder, batch, (batch, sum(counts) + 2), records, fill=np.nan)
            parts, past = [], 0
            for count in counts:
                out = result_of(model, batch, count)
                piece = np.ascontiguousarray(ids[:, past : past + count])
                decoder.step(piece, caches, past, None, None, count, **out)
                parts += [array for array in out.values() if array is not None]
                past += count
            results.append(np.concatenate(parts, 1))
        finally:
            core.use_isa("")
            core.set_thread_count(0)
    assert np.array_equal(*results, equal_nan=True) and is_right(model, results[0])
    if model.head is None:
        return
    # The same in pages that lie anywhere, all rows at once.
    total, per = sum(counts), -(-sum(counts) // page_tokens)
    pages = rng.permutation(batch * per).astype(np.int32).reshape(batch, per)
    pools = new_caches(decoder, batch, (batch * per, page_tokens), records, first=False, fill=np.nan)
    out = np.zeros((batch * total, results[0].shape[2]), results[0].dtype)
    rows = np.repeat(np.arange(batch), total), np.tile(np.arange(total), batch)
    decoder.step_rows(ids.reshape(-1), *rows, pages, page_tokens, pools, np.arange(batch * total), out)
    assert np.array_equal(out.reshape(results[0].shape), results[0], equal_nan=True)


def with_last(array: np.ndarray, number: int) -> np.ndarray:
    """A copy of an array with another last element."""
    changed = array.copy()
    changed.flat[-1] = number
    return changed


def mutants(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values for a field or an argument, and why they are others."""
    yield from (("type", other) for other in ("text", SimpleNamespace(), 1 + 2j))
    yield "none", None
    yield from (("value", other) for other in ((), (None,), [[]]))
    if value is None or isinstance(value, np.ndarray):  # an array without values is no way to say None
        dtypes = (np.float32, np.int32, np.int64) if value is None else (value.dtype,)
        yield from (("empty", np.zeros(0, dtype)) for dtype in dtypes)
    if isinstance(value, bool):
        yield "value", not value
    elif isinstance(value, int):
        yield from (("value", n) for n in (-1, 0, 1, value + 1, 300, 2**31, 2**40, 2**63 - 1, 2**63, 1.5))
    elif isinstance(value, float):
        yield from (("number", n) for n in (np.nan, np.inf, -1.0, 0.0, 1e38, 1e300))
    elif isinstance(value, list | tuple):
        yield from (("value", other) for other in (value[:-1], [*value, None]))
        yield "number", (*value, *value)  # numbers grow from layer to layer
    elif isinstance(value, np.ndarray):
        yield from (("type", value.astype(dtype)) for dtype in (np.float64, np.complex64) if value.dtype != dtype)
        with np.errstate(invalid="ignore"):
            yield from (("value", value.astype(dtype)) for dtype in (np.float16, np.int8, np.uint8, np.int64))
        for axis, size in enumerate(value.shape):
            yield from (
                ("value", np.take(value, range(n), axis, mode="wrap")) for n in (0, size - 1, size + 1) if n >= 0
            )
            if size > 1:
                yield "layout", np.repeat(value, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
        yield from (("layout", other) for other in (value[None], value.reshape(-1, 1, 1, 1, 1)))
        if value.itemsize > 1 and value.size:
            yield "layout", shifted(value, 1)
        if value.dtype.kind == "f":
            yield from (("number", np.full_like(value, n)) for n in (np.nan, np.inf, 6e4, 0))
        else:
            why = "number" if value.dtype == np.int8 else "value"  # scales of int8 KV records may be anything
            numbers = [n for n in (-1, 0, 1, 100, np.iinfo(value.dtype).max) if n >= np.iinfo(value.dtype).min]
            yield from ((why, np.full_like(value, n)) for n in numbers)
            yield from ((why, with_last(value, n)) for n in numbers if value.size)
            yield why, np.ascontiguousarray(value[::-1])
        fixed = value.copy()
        fixed.flags.writeable = False
        yield "value", fixed
    elif value is None:
        yield from (("value", other) for other in (3, True, 0.5, np.zeros((2, 3), np.float32), np.zeros(4, np.int64)))


def mutated(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Copies of a value in which one field is another: path, why it is another, copy."""
    for why, other in mutants(value) if path else ():
        yield path, why, other
    items = vars(value).items() if isinstance(value, SimpleNamespace) else ()
    for key, item in enumerate(value) if isinstance(value, list | tuple) else items:
        for where, why, other in mutated(item, f"{path}.{key}"):
            whole: Any = list(value) if isinstance(value, tuple) else copy.copy(value)
            if isinstance(value, SimpleNamespace):
                setattr(whole, str(key), other)
            else:
                whole[int(key)] = other
            yield where, why, tuple(whole) if isinstance(value, tuple) else whole


def step_of(model: Any, seed: int, records: bool) -> SimpleNamespace:
    rng, decoder = np.random.default_rng(seed), core.Decoder(model)
    return SimpleNamespace(
        tokens=rng.integers(0, len(model.embedding), (2, 3)),
        caches=new_caches(decoder, 2, (2, 8), records),
        past=2,
        positions=rng.integers(0, 8, (2, 3)),
        padding=np.array([0, 1]),
        kept=3,
        **result_of(model, 2, 3),
    )


def is_right(model: Any, *results: Any) -> bool:
    """Whether results are finite. Logits that are divided by their sum without a scoring may be divided by 0."""
    routers = [layer.experts.router for layer in model.layers if layer.experts is not None]
    may_be_infinite = any(router.scoring == 0 and router.renormalize for router in routers)
    return may_be_infinite or all(np.isfinite(array).all() for array in results if array is not None)


def words(sentence: str) -> set[str]:
    return set(re.findall("[a-z_0-9]+", sentence))


def check_mutant(model: Any, path: str, why: str, other: Any, seed: int) -> None:
    names = [name for name in path.split(".") if not name.isdigit()]
    try:
        decoder = core.Decoder(other)
    except ValueError as problem:
        found = words(".".join(tokens(str(problem))))
        assert found & ({names[-1]} if why in ("type", "layout") else NAMES), f"{path}: {problem}"
        return
    assert why not in ("type", "empty") and (why != "none" or names[-1] not in REQUIRED), f"{path} was accepted"
    step = step_of(model, seed, records=False)
    step.caches = new_caches(decoder, 2, (2, 8), records=seed % 2 == 1)
    try:
        decoder.step(**vars(step))
    except ValueError as problem:
        assert str(problem)
    else:
        may_overflow = why == "number" or (model.embedding.dtype == np.float16 and "activation" in path)
        assert may_overflow or is_right(other, step.hidden_out, step.logits_out), f"{path} led to infinite results"


def given_fields(model: Any) -> set[str]:
    """The optional fields of a model that have a value, without indices."""
    fields = walk(model, FIELDS)
    return {re.sub(r"\[\d+\]", "", path) for path, of, name, (_, no) in fields if no and getattr(of, name) is not None}


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_field_of_a_model_is_checked(mixer: str) -> None:
    """Takes some models, and those with optional fields that no earlier one had."""
    seen: set[str] = set()
    for seed in range(max(1, EXAMPLES // 4)):
        model = Models(seed, [mixer]).model()
        new = given_fields(model) - seen
        seen |= new
        for path, why, other in mutated(model):
            is_new = any(re.sub(r"\.\d+", "", path).startswith(f".{field}") for field in new)
            if is_new or seed < max(1, EXAMPLES // 75):
                check_mutant(model, path, why, other, seed)


@pytest.mark.parametrize("other", [None, 3, "text", SimpleNamespace()])
def test_what_is_no_model(other: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="is missing|incompatible"):
        core.Decoder(other)


@settings(max_examples=max(1, EXAMPLES // 15), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), records=st.booleans())
def test_every_argument_of_a_step_is_checked(seed: int, records: bool) -> None:
    model = Models(seed).model(2)
    decoder = core.Decoder(model)
    parts = {part[0] for layout in decoder.cache_layouts() for part in layout}
    in_pages = SimpleNamespace(
        tokens=np.array([1, 2, 3, 1, 2]),
        sequences=np.array([0, 0, 0, 1, 1]),
        places=np.array([0, 1, 2, 30, 31]),
        pages=np.array([[2, 0], [3, 1]], np.int32),
        page_tokens=16,
        caches=new_caches(decoder, 2, (4, 16), records, first=False),
        wanted=np.array([2, 4]),
        logits_out=np.zeros((2, decoder.vocabulary), model.embedding.dtype),
    )
    calls = [(decoder.step, step_of(model, seed, records))]
    calls += [(decoder.step_rows, in_pages)] if model.head is not None else []
    for call, arguments in calls:
        for path, why, other in mutated(arguments):
            names = set(path.split(".")) - set("0123456789") | (parts if "caches" in path else set())
            try:
                call(**vars(other))
            except (ValueError, TypeError) as problem:
                assert names & words(str(problem)) or why in ("value", "empty"), f"{path}: {problem}"
            else:
                assert why not in ("type", "empty"), f"{path} was accepted"
                outs = getattr(other, "hidden_out", None), other.logits_out
                assert why == "number" or is_right(model, *outs), f"{path} led to infinite results"
            for array in (array for cache in arguments.caches for array in cache if isinstance(array, np.ndarray)):
                array.fill(0)  # it may have become NaN
