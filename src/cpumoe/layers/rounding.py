"""From float weights to integers or codes and scales: round to nearest, scales by the rules of compressed-tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS, ElementType, GroupShape, Scheme, TensorFormat
from cpumoe.layers.small_floats import SMALL_FLOATS, mx_scales, nearest_codes, nearest_fp8, scale_values

# Fractions of the plain scale that the clip search tries: 0.98 to 0.60 in fine steps, where the best scale of most
# groups lies, and 0.56 to 0.28 in coarse ones for channels with a few large weights (int4 per channel, weights of
# Student's t with 5 degrees of freedom: relative error 0.200 without the coarse ones, 0.186 with them).
_CLIP_FRACTIONS = (*(step / 50 for step in range(49, 29, -1)), *(step / 25 for step in range(14, 6, -1)))
# Elements the clip search works on at a time, so that its memory does not grow with the weight.
_CHUNK = 1 << 18


def quantize_weight(
    weight: Tensor,
    scheme: Scheme,
    name: str = "weight",
    *,
    clip_search: bool = False,
    largest_magnitude: Tensor | None = None,
) -> QuantizedWeight:
    """Quantises [..., out, in] float weights.

    Symmetric integers: the scale of a group is its largest magnitude over half the integer range (7.5 for int4, 127.5
    for int8), held in bf16 for bf16 weights and fp32 otherwise; values are rounded to nearest even and clamped. With
    ``clip_search`` the scale of each group is the one with the smallest squared error among that, smaller ones, and the
    one that just clips nothing. Asymmetric ones: the range of a group, with zero in it, over 15 or 255 steps. fp8: the
    largest magnitude of a row, a block or the matrix becomes 448; scales are held as those of integers are. E8M0
    scales: the largest magnitude of a group becomes at most the largest of the element, or is clamped to it. nvfp4: it
    becomes 6, and the largest of the e4m3 scales 448. Floats: a cast.

    ``largest_magnitude`` is that of a matrix of which ``weight`` is a part, for schemes with a scale for all of it.
    """
    form = scheme.weights
    if form.element in WHOLE_FLOATS:
        return _cast_weight(weight, form.element, name)
    grouped, scale_dtype = grouped_weight(weight, scheme, name)
    if form.scale == "e8m0":
        return _quantize_mx(grouped, form.element)
    if form.element == "fp4":
        return _quantize_nvfp4(grouped, largest_magnitude)
    if form.element == "fp8":
        return _quantize_fp8(grouped, form.group, scale_dtype, largest_magnitude)
    if not form.symmetric:
        return _quantize_asymmetric(grouped, form, scale_dtype)
    largest = form.largest
    scales = (search_scales if clip_search else plain_scales)(grouped, largest, scale_dtype)
    return QuantizedWeight(form.element, round_to_scales(grouped, scales, largest).flatten(-2), scales)


_DTYPES: dict[ElementType, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _cast_weight(weight: Tensor, element: ElementType, name: str) -> QuantizedWeight:
    """[..., out, in] floats, each as the nearest of its kind; without scales."""
    check_floats(weight, name)
    values = weight.to(_DTYPES[element])
    if values.dtype != weight.dtype and not _is_finite(values):
        largest = torch.finfo(values.dtype).max
        raise ValueError(
            f"{name} holds {float(weight.abs().max()):g}, which is no number of {element}; magnitudes up to "
            f"{largest:g} are accepted"
        )
    return QuantizedWeight(element, values, torch.empty((*weight.shape[:-1], 0), dtype=torch.float32))


def _quantize_asymmetric(grouped: Tensor, form: TensorFormat, scale_dtype: torch.dtype) -> QuantizedWeight:
    """[..., out, groups, group] fp32 -> integers with zero points."""
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    first, last = -form.largest - 1, form.largest
    scales = ((high - low) / (last - first)).to(scale_dtype)
    scales = torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales)
    step = scales.to(torch.float32)
    zero = (first - low / step).round().clamp(first, last)
    values = (grouped / step.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(first, last)
    return QuantizedWeight(form.element, values.to(torch.int8).flatten(-2), scales, zero.to(torch.int8))


def _quantize_mx(grouped: Tensor, element: ElementType) -> QuantizedWeight:
    """[..., out, groups, 32] fp32 -> small floats with E8M0 scales."""
    # Beyond this the largest value of the element times the scale would be infinite in fp32.
    last = 254 - SMALL_FLOATS[element].largest_exponent
    scales = mx_scales(grouped.abs().amax(-1), element).clamp(max=last)
    scaled = (grouped / scale_values(scales).unsqueeze(-1)).flatten(-2)
    return QuantizedWeight(element, nearest_fp8(scaled) if element == "fp8" else nearest_codes(scaled, element), scales)


_LARGEST_E4M3 = SMALL_FLOATS["fp8"].largest


def _quantize_nvfp4(grouped: Tensor, largest_magnitude: Tensor | None) -> QuantizedWeight:
    """[..., out, groups, 16] fp32 -> e2m1 with e4m3 scales and one factor for each matrix, held for every row."""
    magnitude = grouped.abs().amax(-1)  # [..., out, groups]
    whole = magnitude.amax((-2, -1), keepdim=True) if largest_magnitude is None else largest_magnitude.view(1, 1)
    whole = whole.clamp(min=torch.finfo(torch.float32).tiny)
    global_scale = (_LARGEST_E4M3 * 6 / whole).nan_to_num(posinf=1.0)
    scales = nearest_fp8(global_scale * (magnitude / 6))
    smallest = torch.tensor(2.0**-9).to(torch.float8_e4m3fn)
    scales = torch.where(scales.to(torch.float32) == 0, smallest, scales)
    step = scales.to(torch.float32) / global_scale
    factors = (1.0 / global_scale).expand(*magnitude.shape[:-1], 1).squeeze(-1).contiguous()
    codes = nearest_codes(grouped / step.unsqueeze(-1), "fp4")
    return QuantizedWeight("fp4", codes.flatten(-2), scales, factors=factors)


def _quantize_fp8(
    grouped: Tensor, group: GroupShape, scale_dtype: torch.dtype, largest_magnitude: Tensor | None
) -> QuantizedWeight:
    """[..., out, groups, group] fp32 -> e4m3 with a scale for each row, block of rows and group, or matrix."""
    magnitude = grouped.abs().amax(-1)  # [..., out, groups]
    out = magnitude.shape[-2]
    if group.rows is None:
        whole = magnitude.amax((-2, -1), keepdim=True)
        magnitude = whole if largest_magnitude is None else largest_magnitude.to(torch.float32).expand(whole.shape)
    elif group.rows > 1:
        padded = torch.nn.functional.pad(magnitude, (0, 0, 0, -out % group.rows))
        magnitude = padded.unflatten(-2, (-1, group.rows)).amax(-2)
    scales = (magnitude / _LARGEST_E4M3).to(scale_dtype)
    weight = QuantizedWeight("fp8", grouped.flatten(-2), torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales))
    steps = weight.row_scales().to(torch.float32).unsqueeze(-1)
    return replace(weight, values=nearest_fp8(grouped / steps).flatten(-2))


def scales_span_rows(form: TensorFormat) -> bool:
    """Whether scales of a weight depend on all of its rows, so that some alone cannot be quantised as they would be."""
    # Those of e4m3 have a factor for all of the matrix.
    return form.scale == "e4m3" or (form.scale != "none" and form.group.rows is None)


def scales_span_columns(form: TensorFormat) -> bool:
    """The same for the columns: the inputs."""
    return form.scale == "e4m3" or (form.scale != "none" and form.group.columns is None)


def scale_dtype_of(weights: torch.dtype) -> torch.dtype:
    """Dtype of the scales of weights that were quantised from this dtype."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


def grouped_weight(weight: Tensor, scheme: Scheme, name: str) -> tuple[Tensor, torch.dtype]:
    """Checks [..., out, in] float weights; returns them as fp32 [..., out, groups, group] and the dtype of scales."""
    check_floats(weight, name)
    group = scheme.group_size or weight.shape[-1]
    scheme.check_inputs(weight.shape[-1], name)
    grouped: Tensor = weight.to(torch.float32).unflatten(-1, (-1, group))
    return grouped, scale_dtype_of(weight.dtype)


def check_floats(weight: Tensor, name: str) -> None:
    """Raise ValueError for weights that are not finite floats [..., out, in] in CPU memory."""
    if not weight.is_floating_point():
        raise ValueError(f"{name} is {weight.dtype}; a floating point dtype is accepted")
    if weight.device.type != "cpu":
        raise ValueError(f"{name} is on {weight.device}; CPU tensors are accepted")
    if weight.ndim == 0 or weight.shape[-1] == 0:
        raise ValueError(f"{name} is {list(weight.shape)}; [..., out, in] with at least one input is accepted")
    if not _is_finite(weight):
        raise ValueError(f"{name} holds NaN or infinity; only finite weights are accepted")


def _is_finite(values: Tensor) -> bool:
    """Whether all of [..., out, in] floats are numbers, from the extremes: many times faster than looking at each."""
    if values.numel() == 0:
        return True
    if values.dtype not in _DTYPES.values():  # of 64 bits, where fp32 may have no such number, and others
        values = values.to(torch.float32)
    low, high = values.detach().aminmax()  # NaN if there is one
    return math.isfinite(low) and math.isfinite(high)


def plain_scales(grouped: Tensor, largest: int, scale_dtype: torch.dtype) -> Tensor:
    """[..., groups, group] fp32 -> scales [..., groups] by the rule of compressed-tensors."""
    scales = (grouped.abs().amax(-1) / (largest + 0.5)).to(scale_dtype)
    return torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales)


def round_to_scales(grouped: Tensor, scales: Tensor, largest: int) -> Tensor:
    """[..., groups, group] fp32 and scales [..., groups] -> int8 [..., groups, group]."""
    values = grouped / scales.to(torch.float32).unsqueeze(-1)
    return values.round_().clamp_(-largest - 1, largest).to(torch.int8)


def search_scales(grouped: Tensor, largest: int, scale_dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """[..., groups, group] fp32 -> the scales [..., groups] with the smallest squared error among some candidates.

    ``importance`` [groups, group] weighs the squared errors. The plain scale is one of the candidates, and errors are
    those of the scales as stored, so that no group is worse off than with ``plain_scales``.
    """
    grouped = grouped.detach()
    scales = plain_scales(grouped, largest, scale_dtype).contiguous()
    rows = grouped.reshape(-1, *grouped.shape[-2:])
    best = scales.view(-1, scales.shape[-1])  # the same memory as scales
    step = max(1, _CHUNK // (rows.shape[1] * rows.shape[2]))
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        _improve_scales(rows[chunk], best[chunk], largest, importance)
    return scales


def _improve_scales(grouped: Tensor, scales: Tensor, largest: int, importance: Tensor | None) -> None:
    """Replaces plain scales [rows, groups] of [rows, groups, group] where a candidate has a smaller error."""
    magnitude = grouped.abs().amax(-1)
    # Errors are taken in units of a power of two near the largest weight: exact, and squares neither underflow nor
    # overflow. The power is kept to those that fp32 has.
    unit = torch.ldexp(torch.ones_like(magnitude), -torch.frexp(magnitude).exponent.clamp(-126, 126))
    target = grouped * unit.unsqueeze(-1)
    buffer = torch.empty_like(target)

    def error(candidate: Tensor) -> Tensor:
        step = (candidate.to(torch.float32) * unit).unsqueeze(-1)
        torch.div(target, step, out=buffer).round_().clamp_(-largest - 1, largest).mul_(step).sub_(target).square_()
        return (buffer if importance is None else buffer.mul_(importance)).sum(-1)

    plain = scales.clone()
    least = error(plain)
    candidates = [plain.to(torch.float32) * fraction for fraction in _CLIP_FRACTIONS]
    candidates.append(magnitude / largest)  # nothing is clipped: the positive side has one integer less
    for candidate in candidates:
        stored = candidate.to(scales.dtype)
        stored = torch.where(stored > 0, stored, plain)  # too small for the dtype
        found = error(stored)
        # The margin is above the rounding of the sums, so a scale chosen is a better one and not a tie.
        better = found < least * (1 - 1e-5)
        least = torch.where(better, found, least)
        scales.copy_(torch.where(better, stored, scales))
