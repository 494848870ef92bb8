"""Types of the compiled core (core/bind/module.cc)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

# Anything with DLPack's C exchange table, DLPack or the buffer protocol; these are what is used.
Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

class PackedSpec:
    """What packed weights are: all that their header says."""

    def __init__(
        self,
        *,
        weights: str,
        group_size: int | None,
        scales: str,
        experts: int,
        out_features: int,
        in_features: int,
        gated: bool,
        has_bias: bool,
        has_zero_points: bool,
        activations: str,
        input_orders: int = 0,
        input_scales: int = 0,
    ) -> None: ...
    @property
    def weights(
        self,
    ) -> Literal["int4", "int8", "fp4", "fp6-e3m2", "fp6-e2m3", "fp8", "bf16", "fp16", "fp32"]: ...
    @property
    def weight_format(self) -> str: ...
    @property
    def weight_bits(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def groups(self) -> int: ...
    @property
    def scales(self) -> Literal["float32", "bfloat16", "float16", "e8m0", "e4m3", "none"]: ...
    @property
    def experts(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def has_zero_points(self) -> bool: ...
    @property
    def has_factors(self) -> bool: ...
    @property
    def input_orders(self) -> int: ...
    @property
    def input_scales(self) -> int: ...
    @property
    def activations(
        self,
    ) -> Literal[
        "int8",
        "int16",
        "int8-static",
        "fp8",
        "fp8-static",
        "fp8-tensor",
        "fp8-g128",
        "nvfp4",
        "mxfp4",
        "mxfp6-e3m2",
        "mxfp6-e2m3",
        "mxfp8",
        "float",
    ]: ...
    @property
    def packed_bytes(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

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
    prepared_type: int = -1,
    slices: RankExchange | None = None,
) -> None: ...
def choose_slots(
    ids: Array, begins: Array | None, slots: Array | None, first_token: int, loads: Array, out: Array
) -> None: ...
def prepare_tokens(x: Array, gate_up: Array, out: Array) -> None: ...
def prepared_token_bytes(gate_up: Array, type: int) -> int: ...

class RankExchange:
    """What the ranks of a model give each other; see core/runtime/exchange.h."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def waited_seconds(self) -> float: ...
    def gather(self, mine: Array, sizes: Sequence[int], all: Array) -> None: ...
    def trade(self, mine: Array, sizes: Sequence[int], all: Array, given: Sequence[int]) -> None: ...
    def sum(self, values: Array) -> None: ...
    def largest(self, values: Array) -> None: ...
    def check(self) -> None: ...
    def fail(self, reason: str) -> None: ...

class SharedExchange(RankExchange):
    """Through memory that all ranks have mapped."""

    def __init__(
        self, file: int, rank: int, ranks: int, slot_bytes: int, seconds: float, first_rank: int = 0
    ) -> None: ...
    @staticmethod
    def file_bytes(ranks: int, slot_bytes: int) -> int: ...

class CarriedExchange(RankExchange):
    """Through functions of memoryviews."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        gather: Callable[[memoryview, Sequence[int], memoryview], None],
        trade: Callable[[memoryview, Sequence[int], memoryview, Sequence[int]], None],
        sum: Callable[[memoryview], None],
        largest: Callable[[memoryview], None],
    ) -> None: ...

def linear(x: Array, weight: Array, out: Array) -> None: ...
def read_spec(blob: Array) -> PackedSpec: ...
def write_packed_header(blob: Array, spec: PackedSpec) -> None: ...
def pack_into(
    blob: Array,
    first_expert: int,
    values: Array,
    scales: Array,
    zeros: Array | None,
    factors: Array | None,
    bias: Array | None,
    input_order: Array | None,
    input_scales: Array | None,
    order: int,
    name: str,
) -> None: ...
def unpack_into(
    blob: Array,
    first_expert: int,
    values: Array,
    scales: Array,
    zeros: Array | None,
    factors: Array | None,
    bias: Array | None,
    input_order: Array | None,
    input_scales: Array | None,
) -> None: ...
def weight_formats() -> list[tuple[str, str, int, int]]: ...
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
def latent_attention(
    query: Array,
    latents: Array,
    rotated: Array,
    weight: Array,
    mask: Array | None,
    sinks: Array | None,
    scale: float,
    out: Array,
) -> None: ...
def rms_norm(x: Array, weight: Array, epsilon: float, round_first: bool, plus_one: bool, out: Array) -> None: ...
def mamba2(
    projected: Array,
    conv_state: Array,
    state: Array,
    conv_weight: Array,
    conv_bias: Array | None,
    dt_bias: Array,
    A_log: Array,
    D: Array,
    norm_weight: Array | None,
    mask: Array | None,
    groups: int,
    norm_group: int,
    epsilon: float,
    gate_last: bool,
    step_low: float,
    step_high: float,
    out: Array,
) -> None: ...
def mamba_convolution(
    projected: Array, conv_state: Array, weight: Array, bias: Array | None, mask: Array | None, out: Array
) -> None: ...
def selective_scan(
    x: Array,
    steps: Array,
    step_bias: Array | None,
    parameters: Array,
    A_log: Array,
    D: Array,
    gate: Array,
    state: Array,
    b_weight: Array | None,
    c_weight: Array | None,
    epsilon: float,
    out: Array,
) -> None: ...
def lightning_attention(qkv: Array, slopes: Array, state: Array | None, next_state: Array, out: Array) -> None: ...
def gated_delta_rule(
    q: Array,
    k: Array | None,
    v: Array | None,
    z: Array | None,
    b: Array,
    a: Array | None,
    key_heads: int,
    log_rates: Array,
    decay_bias: Array,
    decay_bound: float,
    conv_weight: Array,
    conv_bias: Array | None,
    conv_state: Array,
    state: Array,
    norm_weight: Array,
    norm_epsilon: float,
    sigmoid_gate: bool,
    out: Array,
) -> None: ...
def short_convolution(
    projected: Array, conv_weight: Array, conv_bias: Array | None, conv_state: Array, out: Array
) -> None: ...
def cache_record_bytes(depth: int) -> int: ...
def write_cache_records(values: Array, records: Array) -> None: ...
def read_cache_records(records: Array, values: Array) -> None: ...
def decoder_fields() -> dict[str, list[str]]: ...
def has_changed(entries: tuple[tuple[dict[str, Any], str, Any, int | None, int | None], ...]) -> bool: ...

class Decoder:
    def __init__(self, model: object) -> None: ...
    @property
    def vocabulary(self) -> int: ...
    def step(
        self,
        tokens: Array,
        caches: Sequence[tuple[Array | int, ...]],
        past: int,
        positions: Array | None,
        padding: Array | None,
        kept: int,
        hidden_out: Array | None,
        logits_out: Array | None,
    ) -> None: ...
    def step_rows(
        self,
        tokens: Array,
        sequences: Array,
        places: Array,
        pages: Array,
        page_tokens: int,
        caches: Sequence[tuple[Array, ...]],
        wanted: Array,
        logits_out: Array,
    ) -> None: ...
    def cache_layouts(self) -> list[list[tuple[str, bool, list[int], int, bool]]]: ...
    def help(self) -> int: ...
    def take_seconds(self) -> list[float]: ...

def read_rate(data: Array) -> float: ...
def dot_rate(iterations: int, floats: bool = False) -> float: ...
def instruction_sets() -> list[tuple[str, bool, str, bool]]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def thread_count() -> int: ...
def set_thread_count(threads: int) -> None: ...
def thread_source() -> str: ...
def available_cpus() -> int: ...
def set_cpu_quota(cpus: int) -> None: ...
def amx_palette_hidden() -> bool: ...
def cpu_name() -> str: ...
def advise_huge_pages(data: Array) -> None: ...
def set_nodes(places: list[tuple[list[int], int]]) -> None: ...
def node_shares(cpus: list[int], count: int) -> list[int]: ...
def place_packed(data: Array) -> tuple[int, int, int]: ...
def guard_mapping(address: int, bytes: int, path: str) -> None: ...
def read_runs(fd: int, start: int, file_stride: int, out: Array) -> int: ...
