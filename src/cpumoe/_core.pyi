"""Types of the compiled core (core/bind.cc). Arrays are anything with DLPack or the buffer protocol."""

from typing import Any

Array = Any

def moe(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    out: Array,
    activation: int,
    gated: bool,
    alpha: float,
    limit: float,
    weight_on_input: bool,
) -> None: ...
def linear(x: Array, weight: Array, out: Array) -> None: ...
def packed_bytes(
    weight_bits: int,
    scale_bytes: int,
    group: int,
    experts: int,
    columns: int,
    depth: int,
    gated: bool,
    has_bias: bool,
) -> int: ...
def write_packed_header(
    blob: Array,
    weight_bits: int,
    scale_bytes: int,
    group: int,
    experts: int,
    columns: int,
    depth: int,
    gated: bool,
    has_bias: bool,
) -> None: ...
def pack_into(
    blob: Array, first_expert: int, values: Array, scales: Array, bias: Array | None, order: int, name: str
) -> None: ...
def describe(blob: Array) -> dict[str, Any]: ...
def select_experts(
    logits: Array,
    weights: Array,
    ids: Array,
    scoring: int,
    score_chosen: bool,
    bias: Array | None,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> None: ...
def router_logits(x: Array, weight: Array, bias: Array | None, logits: Array) -> None: ...
def decode_attention(
    query: Array, keys: Array, values: Array, mask: Array | None, sinks: Array | None, scale: float, out: Array
) -> None: ...
def rms_norm(x: Array, weight: Array, epsilon: float, round_first: bool, out: Array) -> None: ...
def read_rate(data: Array) -> float: ...
def dot_rate(iterations: int) -> float: ...
def instruction_sets() -> list[tuple[str, bool, str]]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def thread_count() -> int: ...
def set_thread_count(threads: int) -> None: ...
def thread_source() -> str: ...
def available_cpus() -> int: ...
def amx_palette_hidden() -> bool: ...
def cpu_name() -> str: ...
def advise_huge_pages(data: Array) -> None: ...
