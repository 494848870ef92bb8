"""What quantised weights that a caller gives must be, before anything is packed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import NVFP4, WHOLE_FLOATS, Scheme
from cpumoe.layers.small_floats import SMALL_FLOATS, scale_values, values_of

_NIBBLES = ((torch.int8, torch.uint8), "int8 values or uint8 nibbles are accepted")
_VALUES: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    **{"int4": _NIBBLES, "int8": _NIBBLES, "fp4": _NIBBLES},
    **dict.fromkeys(("fp6-e3m2", "fp6-e2m3"), ((torch.int8,), "int8 codes are accepted")),
    "fp8": ((torch.float8_e4m3fn,), "float8_e4m3fn is accepted"),
    "bf16": ((torch.bfloat16,), "bfloat16 is accepted"),
    "fp16": ((torch.float16,), "float16 is accepted"),
    "fp32": ((torch.float32,), "float32 is accepted"),
}


def checked_weight(
    name: str, weight: QuantizedWeight, scheme: Scheme, dimensions: tuple[str, ...] = ("experts", "out", "in")
) -> QuantizedWeight:
    """Refuses other devices, ranks and dtypes; scales per channel and per tensor get their last dimensions."""
    values, scales = weight.values, weight.scales
    parts = {"": values, "_scale": scales, "_zero_point": weight.zero_points, "_bias": weight.bias}
    for suffix, tensor in parts.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name}{suffix} is on {tensor.device}; CPU tensors are accepted")
    rank = len(dimensions)
    if values.dim() != rank:
        raise ValueError(f"{name} is {list(values.shape)}; [{', '.join(dimensions)}] is accepted")
    accepted, text = _VALUES[scheme.weights.element]
    if values.dtype not in accepted:
        raise ValueError(f"{name} is {values.dtype}; {text}")
    missing = rank - scales.dim()
    if missing == 1 or (missing == 2 and scheme.weights.group.rows is None):
        scales = scales.reshape(*scales.shape, *[1] * missing)
    zeros = weight.zero_points
    zeros = zeros.unsqueeze(-1) if zeros is not None and zeros.dim() == rank - 1 else zeros
    return replace(weight, scales=scales, zero_points=zeros)


def stored_scales(name: str, scale: Tensor | None, values: Tensor, scheme: Scheme) -> Tensor:
    """Scales as they are given; for floats, which have none, an empty tensor [..., out, 0]."""
    if (scale is not None) != (scheme.weights.scale != "none"):
        raise ValueError(f"{name}_scale is {'missing' if scale is None else 'not expected'} for {scheme}")
    return torch.empty((*values.shape[:-1], 0), dtype=torch.float32) if scale is None else scale


_SCALE_DTYPES = {
    "float": (torch.float32, torch.bfloat16, torch.float16),
    "e8m0": (torch.uint8,),
    "e4m3": (torch.float8_e4m3fn,),
    "none": (torch.float32,),
}


def check_parts(name: str, weight: QuantizedWeight, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Refuses scales, zero points and biases that do not go with weights [..., out, in] of a scheme."""
    *experts, out, inputs = shape
    expected = (*experts, *scheme.weights.scale_shape(out, inputs))
    scales, zeros, bias = weight.scales, weight.zero_points, weight.bias
    if tuple(scales.shape) != expected:
        raise ValueError(f"{name}_scale is {list(scales.shape)}; {list(expected)} is accepted")
    accepted = _SCALE_DTYPES[scheme.weights.scale]
    if scales.dtype not in accepted:
        text = "float32, bfloat16 or float16" if scheme.weights.scale == "float" else str(accepted[0])
        raise ValueError(f"{name}_scale is {scales.dtype}; {text} is accepted for {scheme}")
    if (zeros is None) != scheme.weights.symmetric:
        raise ValueError(f"{name}_zero_point is {'missing' if zeros is None else 'not expected'} for {scheme}")
    if zeros is not None and (tuple(zeros.shape) != expected or zeros.dtype != torch.int8):
        raise ValueError(f"{name}_zero_point is {zeros.dtype} {list(zeros.shape)}; int8 {list(expected)} is accepted")
    order = weight.input_order
    if order is not None and (
        order.dtype != torch.int32 or order.dim() != 2 + len(experts) or order.shape[-1] != inputs
    ):
        wanted = f"int32 [{', '.join(map(str, (*experts, 'orders', inputs)))}]"
        raise ValueError(f"{name}_input_order is {order.dtype} {list(order.shape)}; {wanted} is accepted")
    if bias is not None and tuple(bias.shape) != (*experts, out):
        raise ValueError(f"{name}_bias is {list(bias.shape)}; {[*experts, out]} is accepted")
    check_input_scales(f"{name}_input_scale", weight.input_scales, scheme, tuple(experts))


def check_values(name: str, weight: QuantizedWeight, scheme: Scheme) -> None:
    """Refuses values, scales and zero points that stand for no number: what the packer refuses with their places."""
    form, values = scheme.weights, weight.values
    if form.element in WHOLE_FLOATS or form.element == "fp8":
        numbers = values_of(values, "fp8") if form.element == "fp8" else values
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError(f"{name} holds NaN or infinity; only finite values are accepted")
    else:
        if values.dtype == torch.uint8 and form.bits != 4:
            raise ValueError(f"{name} must be int8 for {form.bits}-bit weights")
        small = SMALL_FLOATS.get(form.element)
        low, kind = (-form.largest - 1, f"an {form.element} value") if small is None else (0, f"a code of {small.name}")
        high = low + 2**form.bits - 1
        if values.dtype == torch.int8 and bool(((values < low) | (values > high)).any()):
            raise ValueError(f"{name} holds a value that is not {kind}; {low} to {high} are accepted")
    scales = scale_values(weight.scales)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"{name}_scale is not finite; only finite scales are accepted")
    if form.scale == "e4m3" and bool(torch.signbit(scales).any()):
        raise ValueError(f"{name}_scale holds a code of a negative number; 0 to 126 are accepted")
    zeros, first, last = weight.zero_points, -form.largest - 1, form.largest
    if zeros is not None and bool(((zeros < first) | (zeros > last)).any()):
        raise ValueError(f"{name}_zero_point holds a value outside of {first} to {last}")


def given_factors(
    name: str,
    global_scale: Tensor | float | None,
    values: Tensor,
    scheme: Scheme,
    gated: bool = False,
    interleaved: bool = False,
) -> Tensor | None:
    """What a caller gives as ``global_scale`` -> factors fp32 [experts, out] of the rows of ``values``, or None.

    The global scale divides. It is one number for all experts, [experts], [experts, 1], or with ``gated`` [experts, 2].
    """
    name += "global_scale"
    if (global_scale is not None) != (scheme.weights.scale == "e4m3"):
        raise ValueError(f"{name} is {'missing' if global_scale is None else 'not expected'} for {scheme}")
    if global_scale is None or values.dim() != 3:
        return None  # values of other dimensions are refused later
    experts, rows = values.shape[:2]
    scale = _of_experts(name, _as_tensor(global_scale), experts, gated)
    _check_positive(name, scale, invertible=True)
    factors = 1.0 / scale
    if factors.shape[1] == 1:
        return factors.expand(experts, rows)
    return factors.repeat(1, rows // 2) if interleaved else factors.repeat_interleave(rows // 2, 1)


def _as_tensor(given: Tensor | float) -> Tensor:
    """Return a tensor unchanged, and other numbers in fp32, whatever the default dtype is."""
    return given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float32)


def _check_positive(name: str, numbers: Tensor, *, invertible: bool) -> None:
    """Raise ValueError naming the first number that is not positive and finite, or whose inverse is not."""
    good = torch.isfinite(numbers) & (numbers > 0)
    if invertible:
        good &= torch.isfinite(1.0 / numbers)
    if not bool(good.all()):
        place = (~good).nonzero()[0].tolist()
        number = float(numbers[tuple(place)])
        where = place if numbers.numel() > 1 else ""
        raise ValueError(f"{name}{where} is {number:g}; a positive and finite fp32 number with an inverse is accepted")


def _of_experts(name: str, numbers: Tensor, experts: int, gated: bool) -> Tensor:
    """One number for all experts, [experts], [experts, 1], or with ``gated`` [experts, 2] -> fp32 [experts, 1 or 2]."""
    if numbers.device.type != "cpu":
        raise ValueError(f"{name} is on {numbers.device}; CPU tensors are accepted")
    shape = tuple(numbers.shape)
    if shape not in ((), (1,), (experts,), (experts, 1), *([(experts, 2)] if gated else [])):
        wanted = f"one number{', ' if gated else ' or '}[{experts}]{f' or [{experts}, 2]' if gated else ''}"
        raise ValueError(f"{name} is {list(shape)}; {wanted} is accepted")
    numbers = numbers.to(torch.float32)
    return numbers if numbers.dim() == 2 else numbers.reshape(-1, 1).expand(experts, 1)


# ---- stored scales of the input --------------------------------------------------------------------------------------


def check_input_scales(name: str, scales: Tensor | None, scheme: Scheme, experts: tuple[int, ...]) -> None:
    """Refuses scales that are missing or not expected, of another shape than [..., 1 or 2], or no positive numbers."""
    if (scales is not None) != needs_input_scales(scheme):
        raise ValueError(f"{name} is {'missing' if scales is None else 'not expected'} for {scheme}")
    if scales is None:
        return
    if scales.dtype != torch.float32 or tuple(scales.shape) not in ((*experts, 1), (*experts, 2)):
        wanted = f"float32 {[*experts, 1]} or {[*experts, 2]}"
        raise ValueError(f"{name} is {scales.dtype} {list(scales.shape)}; {wanted} is accepted")
    _check_positive(name, scales, invertible=scheme.product_activations == NVFP4)


def given_input_scales(
    name: str,
    scale: Tensor | float | None,
    global_scale: Tensor | float | None,
    scheme: Scheme,
    experts: int,
    gated: bool = False,
) -> Tensor | None:
    """What a caller gives as ``input_scale`` or ``input_global_scale`` -> fp32 [experts, 1] or [experts, 2], or None.

    One number for all experts, [experts], [experts, 1], or with ``gated`` [experts, 2] of gate and up.
    """
    divides = scheme.product_activations == NVFP4
    given, other = (global_scale, scale) if divides else (scale, global_scale)
    if other is not None:
        raise ValueError(f"{name}{'input_scale' if divides else 'input_global_scale'} is not expected for {scheme}")
    name += "input_global_scale" if divides else "input_scale"
    if given is None:
        check_input_scales(name, None, scheme, (experts,))
        return None
    scales = _as_tensor(given)
    if not scales.is_floating_point():
        raise ValueError(f"{name} is {scales.dtype}; a floating point dtype is accepted")
    scales = _of_experts(name, scales, experts, gated)
    check_input_scales(name, scales, scheme, (experts,))
    return scales.contiguous()
