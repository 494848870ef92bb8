"""Anything may come through the seam: it computes or raises, it never crashes. Run under AddressSanitizer in CI.

Needs NumPy only, so that the sanitizer sees the core and little else. CPUMOE_CORE names the extension to load.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


def load_core() -> Any:
    path = os.environ.get("CPUMOE_CORE")
    if path is None:
        from cpumoe import _core

        return _core
    loader = importlib.machinery.ExtensionFileLoader("_core", path)
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


core = load_core()
ISAS = [name for name, supported, *_ in core.instruction_sets() if supported]
EXAMPLES = int(os.environ.get("CPUMOE_FUZZ_EXAMPLES", "150"))


def make_spec(
    weights: Any,
    group: Any,
    scales: Any,
    experts: Any,
    out: Any,
    inputs: Any,
    gated: Any,
    bias: Any,
    zeros: Any = False,
    activations: Any = "int8",
    input_scales: Any = 0,
) -> Any:
    return core.PackedSpec(
        weights=weights,
        group_size=group,
        scales=scales,
        experts=experts,
        out_features=out,
        in_features=inputs,
        gated=gated,
        has_bias=bias,
        has_zero_points=zeros,
        activations=activations,
        input_scales=input_scales,
    )


INTEGERS = ("int8", "int16")


class Format(NamedTuple):
    """How weights are held: their element, inputs per scale (0: all), the scales, whether there are zero points, and
    what activations they are multiplied with."""

    element: str
    group: int
    scales: str = "float32"
    zeros: bool = False
    activations: tuple[str, ...] = INTEGERS


FORMATS = [
    *(Format("int4", group, activations=(*INTEGERS, "fp8")) for group in (0, 32)),
    *(Format("int8", 0, activations=(*INTEGERS, "int8-static")), Format("int8", 32)),
    *(Format("int4", group, zeros=True) for group in (0, 32)),
    *(Format("int8", group, zeros=True, activations=("float",)) for group in (0, 32)),
    Format("fp4", 32, "e8m0", activations=(*INTEGERS, "mxfp4", "mxfp8", "fp8")),
    Format("fp4", 16, "e4m3", activations=(*INTEGERS, "nvfp4")),
    Format("fp8", 0, activations=("fp8", "fp8-static", "fp8-tensor", "float")),
    Format("fp8", 128, activations=("fp8-g128", "float")),
    Format("fp8", 32, "e8m0", activations=("mxfp8", "float")),
    *(Format(f"fp6-{kind}", 32, "e8m0", activations=(f"mxfp6-{kind}", "float")) for kind in ("e3m2", "e2m3")),
    *(Format(element, 0, "none", activations=("float",)) for element in ("fp16", "fp32")),  # NumPy has no bf16
]
#: The smallest and largest values; codes of e4m3 are bytes with a sign, and 127 and -1 are NaN.
RANGES = {"int4": (-8, 7), "int8": (-128, 127), "fp4": (0, 15), "fp6-e3m2": (0, 63), "fp6-e2m3": (0, 63)}
RANGES |= {"fp8": (-128, 126), "fp16": (-128, 255), "fp32": (-128, 255)}
STATIC = ("int8-static", "fp8-static", "nvfp4")  # with a stored scale of the inputs


def some_weights(rng: np.random.Generator, form: Format, experts: int, columns: int, depth: int) -> list[Any]:
    """Values, scales, zero points and factors."""
    low, high = RANGES[form.element]
    values = rng.integers(low, high + 1, (experts, columns, depth))
    if form.element == "fp8":
        values[values == -1] = 0
    values = values.astype({"fp16": np.float16, "fp32": np.float32}.get(form.element, np.int8))
    shape = (experts, columns, 0 if form.scales == "none" else depth // form.group if form.group else 1)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    if form.group == 128:
        scales[:] = scales[:, :1]  # one for many rows
    zeros = rng.integers(low, high + 1, shape).astype(np.int8) if form.zeros else None
    factors = None
    if form.scales == "e8m0":
        scales = rng.integers(100, 125, shape).astype(np.uint8)
    if form.scales == "e4m3":
        scales = rng.integers(0, 127, shape).astype(np.uint8)
        factors = rng.uniform(1e-4, 1e-3, (experts, columns)).astype(np.float32)
    return [values, scales, zeros, factors]


def packed(
    rng: np.random.Generator,
    form: Format,
    experts: int,
    columns: int,
    depth: int,
    gated: bool,
    bias: bool,
    activations: str = "int8",
) -> np.ndarray:
    inputs = None
    if activations in STATIC:
        inputs = rng.uniform(0.01, 0.1, (experts, int(rng.integers(1, 3)) if gated else 1)).astype(np.float32)
    spec = make_spec(
        *(form.element, form.group or None, form.scales, experts, columns, depth, gated, bias),
        *(form.zeros, activations, 0 if inputs is None else inputs.shape[1]),
    )
    blob = np.full(spec.packed_bytes, 255, np.uint8)
    core.write_packed_header(blob, spec)
    biases = rng.normal(size=(experts, columns)).astype(np.float32) if bias else None
    parts = some_weights(rng, form, experts, columns, depth)
    core.pack_into(blob, 0, *parts, biases, None, inputs, 1 if gated else 0, "w")
    parts += [biases, None, inputs]
    back = [None if part is None else np.empty_like(part) for part in parts]
    if form.element == "fp4":
        back[3] = np.empty((experts, columns), np.float32)
    core.unpack_into(blob, 0, *back)
    assert all(part is None or np.array_equal(part, got) for part, got in zip(parts, back, strict=True))
    return blob


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """A copy in memory that begins `by` bytes after a multiple of 64."""
    memory = np.zeros(array.nbytes + 64 + by, np.uint8)
    start = -memory.ctypes.data % 64 + by
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


sizes = st.integers(1, 6).map(lambda n: n * 32)
# The ends of 64 bits and what is near them once it has been multiplied.
huge = st.sampled_from([s * (1 << p) + d for p in (31, 32, 48, 62, 63) for s in (-1, 1) for d in (-1, 0, 1)])
offsets = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 8])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    hidden=sizes,
    inner=sizes,
    experts=st.integers(1, 5),
    tokens=st.integers(0, 40),
    topk=st.integers(0, 4),
    form=st.sampled_from(FORMATS),
    activations=st.tuples(st.integers(0, 4), st.sampled_from([0, 1, "the same", "the same"])),
    gated=st.booleans(),
    bias=st.booleans(),
    activation=st.integers(-1, 6),
    id_range=st.tuples(st.integers(-3, 0), st.integers(1, 7)),
    wide=st.booleans(),
    threads=st.integers(1, 3),
    poison=st.sampled_from([0.0, float("nan"), float("inf"), 3e38, -3e38, 1e-40]),
    shifts=st.tuples(offsets, offsets, offsets, offsets),
    seed=st.integers(0, 99),
)
def test_layers(
    isa: str,
    hidden: int,
    inner: int,
    experts: int,
    tokens: int,
    topk: int,
    form: Format,
    activations: tuple[int, int | str],
    gated: bool,
    bias: bool,
    activation: int,
    id_range: tuple[int, int],
    wide: bool,
    threads: int,
    poison: float,
    shifts: tuple[int, int, int, int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    first = second = form.activations[activations[0] % len(form.activations)]
    if isinstance(activations[1], int):
        second = form.activations[activations[1] % len(form.activations)]
    if form.group == 128:
        hidden, inner = 4 * hidden, 4 * inner
    gate_up = packed(rng, form, experts, inner * (2 if gated else 1), hidden, gated, bias, first)
    down = packed(rng, form, experts, hidden, inner, False, bias, second)
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    if tokens:
        x[0, 0] = poison
    ids = rng.integers(*id_range, (tokens, topk)).astype(np.int64 if wide else np.int32)
    weights = rng.uniform(size=(tokens, topk)).astype(np.float32)
    x, ids, weights = (shifted(a, by) for a, by in zip((x, ids, weights), shifts[:3], strict=True))
    gate_up, down = shifted(gate_up, shifts[3]), shifted(down, shifts[3])  # packed weights need no alignment
    out = np.empty_like(x)
    core.use_isa(isa)
    core.set_thread_count(threads)
    legal = bool(((ids >= -1) & (ids < experts)).all()) and 0 <= activation <= 5 and first == second
    legal = legal and all(a.size == 0 or a.ctypes.data % a.itemsize == 0 for a in (x, ids, weights))
    try:
        core.moe(x, ids, weights, gate_up, down, out, activation, gated, 1.7, 7.0, False)
    except ValueError:
        assert not legal
    else:
        assert legal
        clean = np.isfinite(x).all(1)
        assert np.isfinite(out[clean & (np.abs(x).max(1, initial=0) < 1e30)]).all()
    finally:
        core.use_isa("")
        core.set_thread_count(0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    at=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4),
    length=st.integers(0, 4000),
    form=st.sampled_from(FORMATS),
    activations=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_damaged_blobs(at: list[tuple[int, int]], length: int, form: Format, activations: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = max(64, form.group)
    blob = packed(rng, form, 1, 32, depth, False, False, form.activations[activations % len(form.activations)])
    good = blob.copy()
    for index, value in at:
        blob[index] = value
    cut = np.ascontiguousarray(blob[:length] if length < blob.size else blob)
    x = np.ones((3, depth), np.float32)
    out = np.empty((3, 32), np.float32)
    try:
        core.linear(x, cut, out)
    except ValueError:
        assert not np.array_equal(cut, good)
    else:
        assert np.array_equal(cut, good)


def check_of(header: np.ndarray) -> int:
    """FNV-1a of all that comes before it, as the header has it."""
    value = 1469598103934665603
    for byte in header[:56].tolist():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    words=st.lists(st.tuples(st.integers(2, 13), st.one_of(st.integers(0, 40), huge)), min_size=1, max_size=3),
    form=st.sampled_from(FORMATS),
    activations=st.integers(0, 4),
    isa=st.sampled_from(ISAS),
)
def test_forged_headers(words: list[tuple[int, int]], form: Format, activations: int, isa: str) -> None:
    """Headers whose check is right and whose facts are not: refused, or a format of the same size."""
    depth, held = max(64, form.group), form.activations[activations % len(form.activations)]
    blob = packed(np.random.default_rng(0), form, 1, 32, depth, False, False, held)
    assert check_of(blob) == int(blob[56:64].view(np.uint64)[0])
    for index, value in words:
        blob[:56].view(np.uint32)[index] = value % 2**32
    blob[56:64].view(np.uint64)[0] = check_of(blob)
    x, out = np.ones((3, depth), np.float32), np.empty((3, 32), np.float32)
    core.use_isa(isa)
    try:
        core.linear(x, blob, out)
        spec = core.read_spec(blob)
        assert spec.packed_bytes == blob.size and repr(spec).startswith("PackedSpec(")
    except ValueError:
        pass
    finally:
        core.use_isa("")


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    activations=st.integers(0, 4),
    where=st.integers(0, 3),
    value=st.integers(-128, 255),
    at=st.integers(0, 10**6),
    seed=st.integers(0, 99),
)
def test_any_value_is_packed_or_refused(
    form: Format, activations: int, where: int, value: int, at: int, seed: int
) -> None:
    """One value, code of a scale, zero point or factor is anything: what is accepted comes back as it was."""
    rng = np.random.default_rng(seed)
    depth, held_as = max(96, form.group), form.activations[activations % len(form.activations)]
    parts = some_weights(rng, form, 2, 33, depth)
    part = parts[where]
    if part is None or part.size == 0 or (where == 1 and form.group == 128):  # a scale for many rows is not one alone
        return
    inputs = np.ones((2, 1), np.float32) if held_as in STATIC else None
    spec = make_spec(
        *(form.element, form.group or None, form.scales, 2, 33, depth, False, False),
        *(form.zeros, held_as, 0 if inputs is None else 1),
    )
    blob = np.full(spec.packed_bytes, 255, np.uint8)
    core.write_packed_header(blob, spec)
    index = at % part.size
    part.reshape(-1)[index] = np.array(value).astype(part.dtype)
    held = int(np.array(value).astype(part.dtype)) if part.dtype.kind != "f" else value
    low, high = {
        0: RANGES[form.element],
        1: {"float32": (-128, 255), "e8m0": (0, 254), "e4m3": (0, 126), "none": (0, 0)}[form.scales],
        2: RANGES[form.element],
        3: (1, 255),
    }[where]
    accepted = low <= held <= high and not (form.element == "fp8" and where == 0 and held == -1)
    try:
        core.pack_into(blob, 0, *parts, None, None, inputs, 0, "w")
    except ValueError:
        assert not accepted
        return
    assert accepted
    back = [None if p is None else np.empty_like(p) for p in parts]
    if form.element == "fp4":
        back[3] = np.empty((2, 33), np.float32)
    core.unpack_into(blob, 0, *back, None, None, None if inputs is None else np.empty_like(inputs))
    assert all(p is None or np.array_equal(p, got) for p, got in zip(parts, back, strict=True))


arrays = st.builds(
    lambda dtype, shape, by: shifted(np.zeros(shape, dtype), by),
    st.sampled_from(["f4", "f8", "f2", "i1", "u1", "i4", "i8", "c8", "b1"]),
    st.lists(st.integers(0, 33), max_size=4),
    st.sampled_from([0, 0, 1, 2, 4]),
)
anything = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.floats(), max_size=3), arrays)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    things=st.lists(anything, min_size=8, max_size=8),
    numbers=st.lists(st.one_of(st.integers(-5, 70), huge), min_size=8, max_size=8),
    flag=st.booleans(),
    form=st.sampled_from(FORMATS),
)
def test_any_arguments(things: list[Any], numbers: list[int], flag: bool, form: Format) -> None:
    blob = packed(np.random.default_rng(0), form, 1, 32, max(32, form.group), False, flag, form.activations[0])
    calls = [
        lambda: core.moe(*things[:6], numbers[0], flag, 1.0, 1.0, flag),
        lambda: core.linear(*things[:3]),
        lambda: core.read_spec(things[0]),
        lambda: core.unpack_into(things[0], numbers[0], *things[1:8]),
        lambda: core.pack_into(things[0], numbers[0], *things[1:8], numbers[1], "w"),
        lambda: core.unpack_into(blob, numbers[0], *things[1:8]),
        lambda: core.pack_into(blob, numbers[0], *things[1:8], numbers[1], "w"),
        lambda: core.write_packed_header(things[0], make_spec("int4", None, "float32", *numbers[:3], flag, flag)),
        lambda: make_spec(f"int{numbers[0]}", numbers[1], "bfloat16", *numbers[2:5], flag, flag),
        lambda: make_spec(things[0], things[1], things[2], *numbers[:3], flag, flag, *things[3:5]),
        lambda: core.select_experts(
            things[0], things[1], things[2], numbers[0], flag, things[3], numbers[1], numbers[2], flag, 1.0
        ),
        lambda: core.float_linear(*things[:4]),
        lambda: core.decode_attention(*things[:5], 0.5, things[5]),
        lambda: core.latent_attention(*things[:6], 0.5, things[6]),
        lambda: core.rms_norm(things[0], things[1], 1e-6, flag, not flag, things[2]),
        lambda: core.gated_delta_rule(*things[:6], numbers[0], *things[6:8], -1.0, *things[:5], 1e-6, flag, things[5]),
        lambda: core.short_convolution(*things[:5]),
        lambda: core.read_rate(things[0]),
        lambda: core.advise_huge_pages(things[0]),
    ]
    for call in calls:
        try:
            call()
        except (ValueError, TypeError, BufferError, RuntimeError):
            continue


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    tokens=st.integers(0, 70),
    experts=st.integers(1, 70),
    topk=st.integers(0, 9),
    groups=st.one_of(st.integers(-1, 9), huge),
    topk_groups=st.one_of(st.integers(-1, 9), huge),
    shift=offsets,
    scoring=st.integers(-1, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_routing(
    isa: str,
    tokens: int,
    experts: int,
    topk: int,
    groups: int,
    topk_groups: int,
    shift: int,
    scoring: int,
    flags: tuple[bool, bool, bool],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)).astype(np.float32)
    if tokens:
        logits[0, 0] = np.nan
    logits = shifted(logits, shift)
    weights, ids = np.empty((tokens, topk), np.float32), np.empty((tokens, topk), np.int32)
    bias = rng.normal(size=experts).astype(np.float32) if flags[0] else None
    core.use_isa(isa)
    try:
        core.select_experts(logits, weights, ids, scoring, flags[1], bias, groups, topk_groups, flags[2], 1.0)
    except (ValueError, TypeError):  # nanobind refuses what is no int64
        return
    finally:
        core.use_isa("")
    assert logits.size == 0 or shift % 4 == 0
    assert ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == topk for row in ids.tolist())


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    batch=st.integers(0, 3),
    kv_heads=st.integers(0, 3),
    share=st.integers(0, 5),
    tokens=st.integers(0, 150),
    depth=st.integers(0, 40),
    value_depth=st.integers(0, 40),
    masked=st.booleans(),
    sunk=st.booleans(),
    shift=offsets,
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_what_surrounds_the_experts(
    isa: str,
    batch: int,
    kv_heads: int,
    share: int,
    tokens: int,
    depth: int,
    value_depth: int,
    masked: bool,
    sunk: bool,
    shift: int,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return shifted(rng.normal(size=shape).astype(np.float32), shift)

    heads = kv_heads * share
    out, logits, normed = some(batch, heads, value_depth), some(batch, tokens), some(batch, depth)
    mask = shifted(np.zeros((batch, tokens), np.float32), shift) if masked else None
    if masked:
        mask[:, : rng.integers(tokens + 1)] = -np.inf
    keys, values = some(batch, kv_heads, tokens, depth), some(batch, kv_heads, tokens, value_depth)
    core.use_isa(isa)
    core.set_thread_count(threads)
    try:
        core.float_linear(some(batch, depth), some(tokens, depth), some(tokens) if masked else None, logits)
        core.rms_norm(some(batch, depth), some(depth), 1e-6, masked, not masked, normed)
        sinks = some(heads) if sunk else None
        core.decode_attention(some(batch, heads, depth), keys, values, mask, sinks, 0.3, out)
        latents, rotated = some(batch, 1, tokens, depth + 1), some(batch, 1, tokens, share)
        weight, made = some(heads * 2 * value_depth, depth + 1), some(batch, 1, heads, value_depth)
        query, rows = some(batch, heads, 1, value_depth + share), None if mask is None else mask[:, None]
        core.latent_attention(query, latents, rotated, weight, rows, sinks, 0.3, made)
    except ValueError:
        assert kv_heads == 0 or tokens == 0 or depth == 0 or shift % 4 != 0
        return
    finally:
        core.use_isa("")
        core.set_thread_count(0)
    assert all(np.isfinite(array).all() for array in (out, logits, normed, made))
