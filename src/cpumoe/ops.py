"""The operators: ``torch.ops.cpumoe.*``, with fakes so that torch.compile and torch.export trace them.

Registered through ``torch.library.Library``: the ``custom_op`` decorator costs several microseconds more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cpumoe import _core

# How the rows of a first product lie in memory (core/packed.h).
ROWS_PLAIN, ROWS_GATE_THEN_UP, ROWS_GATE_UP_INTERLEAVED = 0, 1, 2

_library = torch.library.Library("cpumoe", "DEF")

P = ParamSpec("P")
R = TypeVar("R")


def _register(schema: str, implementation: Callable[P, R], fake: Callable[..., Any]) -> Callable[P, R]:
    """Defines an operator for CPU tensors; ``fake`` gives the shapes and dtypes of its results.

    Returns a function that does what the operator does, without its detour of three to four microseconds where nobody
    would notice. The operator itself is for compilers and for other programs.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CPU")
    # Inference only: results never ask for gradients, instead of asking and then giving none.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"cpumoe::{name}", fake, lib=_library)
    operator = getattr(torch.ops.cpumoe, name).default

    def call(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling() or options or _is_watched() or not _are_plain(arguments):
            result: R = operator(*arguments, **options)
            return result
        return implementation(*arguments)  # type: ignore[call-arg]  # there are no options

    return call


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


def _are_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether all tensors are what they look like: no subclass, on the CPU, nothing still to be applied to them."""
    for argument in arguments:
        if type(argument) not in _PLAIN_TYPES:
            return False
    first = arguments[0]
    return bool(first.is_cpu and not first.is_neg())


def _is_watched() -> bool:
    """Whether something looks at, or takes the place of, operators that are called: a mode, a transform, a profiler."""
    return (
        _modes() > 0
        or _function_modes() > 0
        or _transforms() is not None
        or _tracing() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )


_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def wants_gradient(*tensors: object) -> bool:
    """Whether a gradient would have to flow to one of the arguments; what is not a tensor needs none."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def refuse_gradient(**tensors: object) -> None:
    """Operators give no gradients; what would silently cut them says so instead, with the argument's name."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but packed weights and their routing are for inference: there is no "
                "gradient through them; use torch.no_grad()"
            )


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, its elements at multiples of their size, as the core wants them; a view into bytes may differ."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


def _like_first(first: Tensor, *_: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


# ---- the fused layer -----------------------------------------------------------------------------------------------


def _fused_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: int,
    gated: bool,
    alpha: float,
    limit: float,
    apply_router_weight_on_input: bool,
    fp32_out: bool = False,
) -> Tensor:
    if topk_weights.dtype != torch.float32:  # asked first: even a conversion that does nothing costs a microsecond
        if not topk_weights.is_floating_point():
            raise ValueError(f"topk_weights are {topk_weights.dtype}; a floating point dtype is accepted")
        topk_weights = topk_weights.to(torch.float32)
    x = hidden_states.contiguous()
    out = torch.empty_like(x, dtype=torch.float32) if fp32_out else torch.empty_like(x)
    _core.moe(
        x,
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        gate_up,
        down,
        out,
        activation,
        gated,
        alpha,
        limit,
        apply_router_weight_on_input,
    )
    return out


def _fused_experts_fake(hidden_states: Tensor, *others: object) -> Tensor:
    fp32_out = len(others) == 10 and others[9]  # the last argument, which may be left out
    return torch.empty_like(
        hidden_states,
        dtype=torch.float32 if fp32_out else hidden_states.dtype,
        memory_format=torch.contiguous_format,
    )


# fp32_out: the sums before they are rounded to the dtype of hidden_states, for ranks that add theirs first.
fused_experts = _register(
    "fused_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "int activation, bool gated, float alpha, float limit, bool apply_router_weight_on_input, "
    "bool fp32_out=False) -> Tensor",
    _fused_experts,
    _fused_experts_fake,
)


# ---- the 4-bit operator that others call ---------------------------------------------------------------------------

# activation_kind -> the kernel's activation: 0 and 2 are silu(gate) * up, 1 is gpt-oss' swiglu
_ACTIVATION_KINDS = {0: 0, 1: 1, 2: 0}


def _dynamic_4bit_int_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up_packed: Tensor,
    down_packed: Tensor,
    hidden_size: int,
    intermediate_size: int,
    gate_up_size: int,
    group_size: int,
    apply_router_weight_on_input: bool,
    activation_kind: int,
) -> Tensor:
    if activation_kind not in _ACTIVATION_KINDS:
        raise ValueError(f"activation_kind={activation_kind}; 0, 1 and 2 are accepted")
    if gate_up_size != 2 * intermediate_size:
        raise ValueError(f"gate_up_size={gate_up_size}; twice intermediate_size={intermediate_size} is accepted")
    if group_size == 0:
        raise ValueError("group_size=0; -1 (per channel) or a multiple of 32 is accepted")
    group = None if group_size == -1 else group_size
    sizes = {
        "gate_up_packed": (gate_up_packed, gate_up_size, hidden_size),
        "down_packed": (down_packed, hidden_size, intermediate_size),
    }
    for name, (blob, out_features, in_features) in sizes.items():
        held = read_spec(blob)
        wanted = {
            "weights": "int4",
            "has_zero_points": False,
            "activations": "int8",
            "group_size": group,
            "out_features": out_features,
            "in_features": in_features,
        }
        for key, value in wanted.items():
            if (found := getattr(held, key)) != value:
                raise ValueError(f"{name} was packed with {key}={found}, but the call says {value}")
    return _fused_experts(
        x,
        topk_ids,
        topk_weights,
        gate_up_packed,
        down_packed,
        _ACTIVATION_KINDS[activation_kind],
        True,
        1.702,
        7.0,
        apply_router_weight_on_input,
    )


_register(
    "dynamic_4bit_int_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up_packed, Tensor down_packed, "
    "int hidden_size, int intermediate_size, int gate_up_size, int group_size, bool apply_router_weight_on_input, "
    "int activation_kind) -> Tensor",
    _dynamic_4bit_int_moe,
    _like_first,
)


# ---- the linear ----------------------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, out_features: int, fp32_out: bool = False) -> Tensor:
    x = x.contiguous()
    if x.dim() == 2:  # views cost as much as the seam
        out = torch.empty(x.shape[0], out_features, dtype=torch.float32 if fp32_out else x.dtype)
        _core.linear(x, weight, out)
    else:
        out = _linear_fake(x, weight, out_features, fp32_out)
        _core.linear(x.view(-1, x.shape[-1]), weight, out.view(-1, out_features))
    return out


def _linear_fake(x: Tensor, weight: Tensor, out_features: int, fp32_out: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=torch.float32 if fp32_out else x.dtype)


linear = _register(
    "linear(Tensor x, Tensor weight, int out_features, bool fp32_out=False) -> Tensor", _linear, _linear_fake
)


# ---- packing -------------------------------------------------------------------------------------------------------


#: What packed weights are: weights ("int4", "int8", "fp4"), group_size (None: one scale per row), scales ("float32",
#: "bfloat16", "e8m0", "e4m3"), experts, out_features, in_features, gated, has_bias, has_zero_points and the activations
#: they are multiplied with ("int8", "int16"); all by keyword. It also knows ``packed_bytes``.
PackedSpec = _core.PackedSpec


def read_spec(blob: Tensor) -> PackedSpec:
    """What the header of packed weights says; raises ValueError for what is not packed weights of this version."""
    return _core.read_spec(blob)


#: How scales are held, by the dtype they come in; the codes of E8M0 come as bytes. Others are held as fp32.
_SCALES = {torch.bfloat16: "bfloat16", torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}


def scales_name(dtype: torch.dtype) -> str:
    """How scales of a dtype are held."""
    return _SCALES.get(dtype, "float32")


def scale_dtype(name: str) -> torch.dtype:
    """The dtype that scales so named are given in."""
    return next((dtype for dtype, held in _SCALES.items() if held == name), torch.float32)


class PackedBuilder:
    """Packs a matrix of experts a few at a time, in any order."""

    def __init__(self, spec: PackedSpec) -> None:
        self.spec = spec
        self._blob = torch.empty(spec.packed_bytes, dtype=torch.uint8, device="cpu")
        _core.advise_huge_pages(self._blob)
        _core.write_packed_header(self._blob, spec)
        self._missing = set(range(spec.experts))

    def put(
        self,
        first: int,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        row_order: int,
        name: str,
        *,
        zero_points: Tensor | None = None,
        factors: Tensor | None = None,
        input_order: Tensor | None = None,
    ) -> None:
        """Experts from ``first`` on: values [n, out, in] (or nibbles), scales [n, out, groups] and bias [n, out].

        Zero points are like the scales; factors [n, out] multiply scales of type e4m3. ``input_order`` [n, orders, in]
        int32 lists the inputs so that those that share a scale lie side by side; gate and up rows may have one each.
        """
        experts = set(range(first, first + values.shape[0])) & set(range(self.spec.experts))
        self._missing |= experts  # until it is done: what fails half way leaves nothing behind that could be used
        _core.pack_into(
            self._blob,
            first,
            values.contiguous(),
            _aligned(scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales),
            None if zero_points is None else zero_points.contiguous(),
            None if factors is None else _aligned(factors.to(torch.float32)),
            None if bias is None else _aligned(bias.to(torch.float32)),
            None if input_order is None else _aligned(input_order),
            row_order,
            name,
        )
        self._missing -= experts

    def finish(self) -> Tensor:
        """The packed weights; raises ValueError if an expert is missing."""
        if self._missing:
            missing = sorted(self._missing)
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(f"experts {', '.join(map(str, missing[:8]))}{more} were not packed")
        return self._blob


def _spec_of(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    weights: str,
    row_order: int,
    name: str,
    has_zero_points: bool,
    input_order: Tensor | None,
    activations: str,
) -> PackedSpec:
    if values.dim() != 3:
        raise ValueError(f"{name} has {values.dim()} dimensions; [experts, out_features, in_features] is accepted")
    return PackedSpec(
        weights=weights,
        group_size=None if group_size == -1 else group_size,
        scales=scales_name(scales.dtype),
        experts=values.shape[0],
        out_features=values.shape[1],
        in_features=in_features,
        gated=row_order != ROWS_PLAIN,
        has_bias=bias is not None,
        has_zero_points=has_zero_points,
        input_orders=0 if input_order is None else input_order.shape[1],
        activations=activations,
    )


def _pack(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    weights: str,
    row_order: int,
    name: str = "values",
    zero_points: Tensor | None = None,
    factors: Tensor | None = None,
    input_order: Tensor | None = None,
    activations: str = "int8",
) -> Tensor:
    has_zeros = zero_points is not None
    sizes = (in_features, group_size, weights, row_order, name)
    builder = PackedBuilder(_spec_of(values, scales, bias, *sizes, has_zeros, input_order, activations))
    builder.put(
        0, values, scales, bias, row_order, name, zero_points=zero_points, factors=factors, input_order=input_order
    )
    return builder.finish()


def _pack_fake(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    weights: str,
    row_order: int,
    name: str = "values",
    zero_points: Tensor | None = None,
    factors: Tensor | None = None,
    input_order: Tensor | None = None,
    activations: str = "int8",
) -> Tensor:
    has_zeros = zero_points is not None
    sizes = (in_features, group_size, weights, row_order, name)
    spec = _spec_of(values, scales, bias, *sizes, has_zeros, input_order, activations)
    return torch.empty(spec.packed_bytes, dtype=torch.uint8, device=values.device)


pack = _register(
    "pack(Tensor values, Tensor scales, Tensor? bias, int in_features, int group_size, str weights, "
    'int row_order, str name="values", Tensor? zero_points=None, Tensor? factors=None, Tensor? input_order=None, '
    'str activations="int8") -> Tensor',
    _pack,
    _pack_fake,
)


def unpack(
    blob: Tensor, first: int = 0, count: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Experts ``first`` to ``first + count - 1`` of packed weights (all by default), as they were packed.

    To the bit, but for scales of int4 weights below 2^-122, whose sixteenth, which is what is held, has fewer bits.

    Returns:
        int8 values [count, out, in], scales [count, out, groups] (groups is 1 per channel) in the dtype that was
        packed, and, each or None, zero points int8 like the scales, factors and biases [count, out] fp32, and the
        orders of inputs [count, orders, in] int32. Rows of a gated matrix are gate rows, then up rows.
    """
    spec = read_spec(blob)
    count = spec.experts - first if count is None else count
    if not (first >= 0 and 0 <= count <= spec.experts - first):
        raise ValueError(f"experts {first} to {first + count - 1}; 0 to {spec.experts - 1} are packed")
    shape = (count, spec.out_features)

    def empty(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*shape, *last), dtype=dtype, device="cpu")

    values = empty(spec.in_features, dtype=torch.int8)
    dtype = scale_dtype(spec.scales)
    scales = empty(spec.groups, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    zero_points = empty(spec.groups, dtype=torch.int8) if spec.has_zero_points else None
    factors = empty() if spec.has_factors else None
    bias = empty() if spec.has_bias else None
    order = None
    if spec.input_orders:
        order = torch.empty((count, spec.input_orders, spec.in_features), dtype=torch.int32, device="cpu")
    _core.unpack_into(blob.contiguous(), first, values, scales, zero_points, factors, bias, order)
    return values, scales.view(dtype), zero_points, factors, bias, order


# ---- routing -------------------------------------------------------------------------------------------------------

SCORING = {"none": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}


def _select_experts(
    router_logits: Tensor,
    topk: int,
    scoring: int,
    score_chosen: bool,
    correction_bias: Tensor | None,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens = router_logits.shape[0]
    weights, ids = torch.empty(tokens, topk, dtype=torch.float32), torch.empty(tokens, topk, dtype=torch.int32)
    _core.select_experts(
        router_logits.contiguous(),
        weights,
        ids,
        scoring,
        score_chosen,
        correction_bias,
        num_expert_group,
        topk_group,
        renormalize,
        scale,
    )
    return weights, ids


def _select_experts_fake(
    router_logits: Tensor,
    topk: int,
    scoring: int,
    score_chosen: bool,
    correction_bias: Tensor | None,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], topk)
    device = router_logits.device
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


select_experts = _register(
    "select_experts(Tensor router_logits, int topk, int scoring, bool score_chosen, Tensor? correction_bias, "
    "int num_expert_group, int topk_group, bool renormalize, float scale) -> (Tensor, Tensor)",
    _select_experts,
    _select_experts_fake,
)


# ---- a router and attention for few tokens -------------------------------------------------------------------------


def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Tensor:
    logits = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if in_fp32 else x.dtype)
    _core.router_logits(x.contiguous(), weight.contiguous(), bias, logits)
    return logits


def _router_logits_fake(x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if in_fp32 else x.dtype)


# [tokens, H] x [experts, H] -> [tokens, experts], summed in fp32 and then rounded to the dtype of x unless in_fp32.
router_logits = _register(
    "router_logits(Tensor x, Tensor weight, Tensor? bias, bool in_fp32) -> Tensor", _router_logits, _router_logits_fake
)


def _decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    query = query.contiguous()
    out = query.new_empty((*query.shape[:2], values.shape[3]))
    _core.decode_attention(query, keys.contiguous(), values.contiguous(), mask, sinks, scale, out)
    return out


def _decode_attention_fake(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    return query.new_empty((*query.shape[:2], values.shape[3]))


# query [batch, heads, D] over keys and values [batch, kv_heads, tokens, D] with mask [batch, tokens] fp32 added to the
# scores -> [batch, heads, D]. Values may have another D than keys; then the result has theirs. sinks [heads] fp32: one
# score more for each head, which takes its share of the softmax and has no value.
decode_attention = _register(
    "decode_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor? sinks=None) "
    "-> Tensor",
    _decode_attention,
    _decode_attention_fake,
)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, round_first: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.dim() == 2:
        _core.rms_norm(x, weight, epsilon, round_first, out)
    else:
        width = x.shape[-1]
        _core.rms_norm(x.view(-1, width), weight, epsilon, round_first, out.view(-1, width))
    return out


# [..., H] and weight [H] -> [..., H]; round_first: rounded to the dtype of x before the product with the weight too.
rms_norm = _register(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool round_first) -> Tensor", _rms_norm, _like_first
)
