"""What activations become when they are quantised, from the definitions, in plain PyTorch.

A row with a NaN or an infinity becomes NaN, and no other row notices.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cpumoe.layers.scheme import NVFP4, PER_TENSOR_FP8, PER_TOKEN_INT8, STATIC_FP8, STATIC_INT8, Scheme, TensorFormat
from cpumoe.layers.small_floats import SMALL_FLOATS, mx_scales, nearest, scale_values

#: What activations are held as: a format; 16-bit integers per token, which is how the kernels hold floats beside
#: weights of small integers; None: floats as they are.
Held = TensorFormat | Literal["int16"] | None


def held_activations(scheme: Scheme) -> Held:
    """What the kernels hold the activations of a scheme as."""
    return scheme.product_activations or ("int16" if scheme.takes_int8_activations else None)


def needs_input_scales(scheme: Scheme) -> bool:
    """Whether a scale of the input is stored with the weights: for activations that are not found as they are seen."""
    return scheme.product_activations in (STATIC_INT8, STATIC_FP8, NVFP4)


def input_scale_for(largest: Tensor, scheme: Scheme) -> Tensor:
    """Largest magnitudes that an input is expected to have -> its stored scales, by the rules of compressed-tensors."""
    form, largest = scheme.product_activations, largest.to(torch.float32)
    if form == NVFP4:
        whole = largest.clamp(min=torch.finfo(torch.float32).tiny)
        return (SMALL_FLOATS["fp8"].largest * SMALL_FLOATS["fp4"].largest / whole).nan_to_num(posinf=1.0)
    if form not in (STATIC_INT8, STATIC_FP8):
        raise ValueError(f"{scheme} stores no scale of its input")
    scale = largest / (127.5 if form == STATIC_INT8 else SMALL_FLOATS["fp8"].largest)
    return torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)


def input_scale_arguments(scheme: Scheme, gate_up_largest: float, down_largest: float) -> dict[str, Any]:
    """What ``Experts.quantize`` is given for inputs with these largest magnitudes; nothing for most schemes."""
    if not needs_input_scales(scheme):
        return {}
    kind = "input_global_scale" if scheme.product_activations == NVFP4 else "input_scale"
    numbers = {"gate_up": gate_up_largest, "down": down_largest}
    return {f"{name}_{kind}": input_scale_for(torch.tensor(number), scheme) for name, number in numbers.items()}


def activations(x: Tensor, form: Held, input_scale: Tensor | None = None) -> Tensor:
    """[tokens, in] -> the same in fp32 after quantisation. All tokens of one product at once: they may share a scale.

    ``input_scale`` is one number: the stored scale of static formats, the global scale of nvfp4.
    """
    x = x.to(torch.float32)
    finite = torch.isfinite(x).all(-1, keepdim=True)
    x = torch.where(finite, x, 0.0)  # so that these rows change no scale that others share
    return torch.where(finite, _quantised(x, form, input_scale), torch.nan)


def _quantised(x: Tensor, form: Held, input_scale: Tensor | None) -> Tensor:
    if form is None or x.numel() == 0:
        return x
    if form == "int16" or form == PER_TOKEN_INT8:
        return _per_token_integers(x, 16 if form == "int16" else 8)
    if form in (STATIC_INT8, STATIC_FP8, NVFP4):
        if input_scale is None or input_scale.numel() != 1:
            raise ValueError(f"activations {form} with input scale {input_scale}; one number is accepted")
        scale = input_scale.to(torch.float32).reshape(())
        if form == STATIC_INT8:
            return (x / scale).round().clamp(-128, 127) * scale
        return nearest(x / scale, "fp8") * scale if form == STATIC_FP8 else _nvfp4(x, scale)
    if form == PER_TENSOR_FP8:
        return _fp8(x.reshape(1, -1)).view_as(x)
    inputs, group = x.shape[-1], form.group.group_size or x.shape[-1]
    # Zeros at the end, where the last group is shorter, change no scale.
    grouped = torch.nn.functional.pad(x, (0, -inputs % group)).unflatten(-1, (-1, group))
    return (_fp8(grouped) if form.scale == "float" else _mx(grouped, form)).flatten(-2)[..., :inputs]


def _fp8(grouped: Tensor) -> Tensor:
    """One scale for the last dimension, of which the largest magnitude becomes 448."""
    scale = grouped.abs().amax(-1, keepdim=True) / SMALL_FLOATS["fp8"].largest
    return torch.where(scale == 0, 0.0, nearest(grouped / scale, "fp8") * scale)


def _mx(grouped: Tensor, form: TensorFormat) -> Tensor:
    """A power of two for the last dimension."""
    scale = scale_values(mx_scales(grouped.abs().amax(-1, keepdim=True), form.element))
    return nearest(grouped / scale, form.element) * scale


def _nvfp4(x: Tensor, global_scale: Tensor) -> Tensor:
    """e2m1 with an e4m3 scale for 16 inputs, under the global scale."""
    grouped: Tensor = x.unflatten(-1, (-1, 16))
    scale = nearest(global_scale * (grouped.abs().amax(-1, keepdim=True) / 6.0), "fp8")
    codes = nearest(grouped / (scale / global_scale), "fp4")
    return torch.where(scale == 0, 0.0, codes * scale * (1.0 / global_scale)).flatten(-2)


def smallest_range(bits: int) -> float:
    """Return the range of values below which a row counts as zeros: its scale would be subnormal in fp32."""
    return (2.0**bits - 1) * torch.finfo(torch.float32).tiny


def _per_token_integers(x: Tensor, bits: int) -> Tensor:
    """[tokens, in] fp32 -> the same after quantisation to 8 or 16 bits: asymmetric, per token, ties away from zero."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    span = high - low
    steps, first, last = 2.0**bits - 1, -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    # Tensors on the left: PyTorch computes `255.0 / span` as a reciprocal times 255, rounded twice.
    quanta = torch.full_like(span, steps)
    factor = torch.where(torch.isinf(span), quanta / 2 / (high / 2 - low / 2), quanta / span)  # the range overflows
    tiny = span < smallest_range(bits)
    step = torch.where(tiny, 0.0, 1.0 / factor)
    factor = torch.where(tiny, 0.0, factor)
    scaled_low, scaled_high = low * factor, high * factor
    near_low = (first + scaled_low) + (last + scaled_high) > 0
    zero = torch.where(near_low, first - scaled_low, last - scaled_high).clamp(first, last).round()
    scaled = x * factor
    rounded = torch.trunc(scaled + torch.copysign(torch.tensor(0.49999997), scaled))
    return ((rounded + zero).clamp(first, last) - zero) * step
