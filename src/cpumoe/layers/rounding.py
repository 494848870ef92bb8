"""From float weights to integers or codes and scales: round to nearest, scales by the rules of compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme

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
    one that just clips nothing. Asymmetric ones: the range of a group, with zero in it, over 15 steps. fp4: the largest
    magnitude of a group becomes 6, or with E8M0 scales 4 to 8, clamped; of e4m3 scales the largest is 448.

    ``largest_magnitude`` is that of a matrix of which ``weight`` is a part, for schemes with a scale for all of it.
    """
    grouped, scale_dtype = grouped_weight(weight, scheme, name)
    form = scheme.weights
    if form.element == "fp4":
        return _quantize_mxfp4(grouped) if form.scale == "e8m0" else _quantize_nvfp4(grouped, largest_magnitude)
    if not form.symmetric:
        return _quantize_asymmetric(grouped, scale_dtype)
    largest = form.largest
    scales = (search_scales if clip_search else plain_scales)(grouped, largest, scale_dtype)
    return QuantizedWeight(form.element, round_to_scales(grouped, scales, largest).flatten(-2), scales)


def _quantize_asymmetric(grouped: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
    """[..., out, groups, group] fp32 -> int4 with zero points."""
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).to(scale_dtype)
    scales = torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales)
    step = scales.to(torch.float32)
    zero = (-8 - low / step).round().clamp(-8, 7)
    values = (grouped / step.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(-8, 7)
    return QuantizedWeight("int4", values.to(torch.int8).flatten(-2), scales, zero.to(torch.int8))


# Half way between neighbouring magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_FP4_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def fp4_codes(values: Tensor) -> Tensor:
    """Codes 0 to 15 (int8) of the nearest values of e2m1; half way between two, the one with the even code."""
    magnitude = values.abs().contiguous()  # bucketize warns of strides
    below = torch.bucketize(magnitude, _FP4_MIDDLES)  # these two differ at a middle alone
    above = torch.bucketize(magnitude, _FP4_MIDDLES, right=True)
    codes = torch.where(above % 2 == 0, above, below)
    return (codes + 8 * torch.signbit(values)).to(torch.int8)


def _quantize_mxfp4(grouped: Tensor) -> QuantizedWeight:
    """[..., out, groups, 32] fp32 -> e2m1 with E8M0 scales."""
    magnitude = grouped.abs().amax(-1)
    # The largest becomes 4 to 8. Rounded to two bits first, so that what would exceed 7 goes to the next power.
    bits = (magnitude.view(torch.int32) + (1 << 21)) & 0x7F800000
    exponent = (bits >> 23) - 2
    scales = exponent.clamp(0, 252).to(torch.uint8)  # beyond it 6 times the scale would be infinite in fp32
    step = torch.ldexp(torch.ones_like(magnitude), scales.to(torch.int32) - 127)
    return QuantizedWeight("fp4", fp4_codes(grouped / step.unsqueeze(-1)).flatten(-2), scales)


_LARGEST_E4M3 = 448.0


def _quantize_nvfp4(grouped: Tensor, largest_magnitude: Tensor | None) -> QuantizedWeight:
    """[..., out, groups, 16] fp32 -> e2m1 with e4m3 scales and one factor for each matrix, held for every row."""
    magnitude = grouped.abs().amax(-1)  # [..., out, groups]
    whole = magnitude.amax((-2, -1), keepdim=True) if largest_magnitude is None else largest_magnitude.view(1, 1)
    whole = whole.clamp(min=torch.finfo(torch.float32).tiny)
    global_scale = (_LARGEST_E4M3 * 6 / whole).nan_to_num(posinf=1.0)
    scales = (global_scale * (magnitude / 6)).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    smallest = torch.tensor(2.0**-9).to(torch.float8_e4m3fn)
    scales = torch.where(scales.to(torch.float32) == 0, smallest, scales)
    step = scales.to(torch.float32) / global_scale
    factors = (1.0 / global_scale).expand(*magnitude.shape[:-1], 1).squeeze(-1).contiguous()
    return QuantizedWeight("fp4", fp4_codes(grouped / step.unsqueeze(-1)).flatten(-2), scales, factors=factors)


def scale_dtype_of(weights: torch.dtype) -> torch.dtype:
    """Dtype of the scales of weights that were quantised from this dtype."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


def grouped_weight(weight: Tensor, scheme: Scheme, name: str) -> tuple[Tensor, torch.dtype]:
    """Checks [..., out, in] float weights; returns them as fp32 [..., out, groups, group] and the dtype of scales."""
    if not weight.is_floating_point():
        raise ValueError(f"{name} is {weight.dtype}; a floating point dtype is accepted")
    if weight.ndim == 0 or weight.shape[-1] == 0:
        raise ValueError(f"{name} is {list(weight.shape)}; [..., out, in] with at least one input is accepted")
    group = scheme.group_size or weight.shape[-1]
    scheme.check_inputs(weight.shape[-1], name)
    grouped: Tensor = weight.to(torch.float32).unflatten(-1, (-1, group))
    if not bool(torch.isfinite(grouped).all()):
        raise ValueError(f"{name} holds NaN or infinity; only finite weights can be quantised")
    return grouped, scale_dtype_of(weight.dtype)


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
