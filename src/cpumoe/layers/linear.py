"""QuantizedLinear: a linear layer on the kernels of the fused layer (the native ones; it has no other backend)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.layers.packed_weights import builder_for, put_weight, scheme_of, state_mismatches
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.layers.weight_checks import check_parts, checked_weight, given_factors, given_input_scales, stored_scales


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias`` with a quantised weight; the packed weight is a buffer."""

    weight_packed: Tensor

    def __init__(self, weight_packed: Tensor) -> None:
        """Takes packed weights (one matrix), checked by their header."""
        super().__init__()
        spec = ops.read_spec(weight_packed)
        if spec.experts != 1 or spec.gated:
            raise ValueError("these are the packed weights of experts, not of a linear")
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.scheme = scheme_of(spec)
        self.register_buffer("weight_packed", weight_packed)

    @classmethod
    def from_quantized(
        cls,
        weight: Tensor,
        scale: Tensor | None,
        scheme: Scheme | str,
        bias: Tensor | None = None,
        *,
        zero_point: Tensor | None = None,
        global_scale: Tensor | float | None = None,
        input_scale: Tensor | float | None = None,
        input_global_scale: Tensor | float | None = None,
    ) -> QuantizedLinear:
        """Takes integers (or codes) and scales.

        Args:
            weight: [out, in] int8 values, or uint8 nibbles [out, ceil(in / 2)] (low one first; integers are stored plus
                8, fp4 as its codes). With nibbles and one scale per channel the number of inputs is taken to be even.
                int8 codes for fp6; float8_e4m3fn for fp8; bfloat16, float16 or float32 as they are.
            scale: [out, in/g], or [out, 1] or [out] per channel, [1, 1], [1] or [] per tensor, [out/128, in/128] in
                blocks; uint8 (E8M0) for the mx schemes, float8_e4m3fn for nvfp4; None where the weights are floats.
            scheme: a Scheme or its name.
            bias: [out] or None.
            zero_point: int8, -8 to 7 or for int8 weights any, like the scales; for asymmetric schemes.
            global_scale: one number, which divides the scales; for nvfp4.
            input_scale: one number, the scale of the input; for schemes with static activations.
            input_global_scale: one number, which divides the scales of the input; for nvfp4.
        """
        scheme = Scheme.parse(scheme)
        scale = stored_scales("weight", scale, weight, scheme)
        of_one = given_factors("", global_scale, weight.unsqueeze(0), scheme)
        factors = None if of_one is None else of_one[0]
        inputs = _input_scale(input_scale, input_global_scale, scheme)
        element = scheme.weights.element
        return cls.from_weight(
            QuantizedWeight(element, weight, scale, zero_point, factors, bias, input_scales=inputs), scheme
        )

    @classmethod
    def from_weight(cls, weight: QuantizedWeight, scheme: Scheme) -> QuantizedLinear:
        """Takes a quantised weight [out, in] with all that belongs to it."""
        weight = checked_weight("weight", weight, scheme, ("out", "in"))
        values = weight.values
        out_features, in_features = values.shape[0], values.shape[1] * (2 if values.dtype == torch.uint8 else 1)
        scheme.check_inputs(in_features, "weight")
        check_parts("weight", weight, scheme, (out_features, in_features))
        one = weight.each(lambda t: t.unsqueeze(0))
        builder = builder_for(one, scheme, 1, out_features, in_features)
        put_weight(builder, 0, one, ops.ROWS_PLAIN, "weight")
        linear = cls(builder.finish())
        linear.scheme = scheme  # packed weights do not tell all of it: see scheme_of
        return linear

    @classmethod
    def quantize(
        cls,
        weight: Tensor | nn.Linear,
        scheme: Scheme | str,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor | float | None = None,
        input_global_scale: Tensor | float | None = None,
    ) -> QuantizedLinear:
        """Quantise a float weight, round to nearest.

        Args:
            weight: [out, in], or an ``nn.Linear``, whose bias is taken too.
            scheme: a Scheme or its name.
            bias: [out] or None.
            input_scale, input_global_scale: as in :meth:`from_quantized`.
        """
        scheme = Scheme.parse(scheme)
        if isinstance(weight, nn.Linear):
            if bias is not None and weight.bias is not None:
                raise ValueError(f"bias is given, and {weight} has one; give one of them")
            own_bias = None if weight.bias is None else weight.bias.detach()
            weight, bias = weight.weight.detach(), own_bias if bias is None else bias
        if not isinstance(weight, Tensor):
            raise ValueError(
                f"weight is a {type(weight).__name__}; a float tensor [out, in] or an nn.Linear is accepted"
            )
        inputs = _input_scale(input_scale, input_global_scale, scheme)
        return cls.from_weight(replace(quantize_weight(weight, scheme), bias=bias, input_scales=inputs), scheme)

    def forward(self, x: Tensor, *, fp32_out: bool = False) -> Tensor:
        """[..., in] float32, bfloat16 or float16 -> [..., out] of the same dtype, or with ``fp32_out`` in fp32."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}; [..., {self.in_features}] is accepted")
        ops.refuse_gradient(x=x)
        return ops.linear(x, self.weight_packed, self.out_features, fp32_out)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        if problems := list(state_mismatches(self._buffers.items(), state_dict, prefix)):
            arguments[-1].extend(problems)  # load_state_dict raises them, as it does for other shapes
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"


def _input_scale(scale: Tensor | float | None, global_scale: Tensor | float | None, scheme: Scheme) -> Tensor | None:
    """The scale of the input [1], checked, or None for schemes without."""
    inputs = given_input_scales("", scale, global_scale, scheme, 1)
    return None if inputs is None else inputs[0]
