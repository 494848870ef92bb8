"""QuantizedLinear: a linear layer on the kernels of the fused layer (the native ones; it has no other backend)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.layers.packed_weights import scheme_of
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme


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
        cls, weight: Tensor, scale: Tensor, scheme: Scheme | str, bias: Tensor | None = None
    ) -> QuantizedLinear:
        """Takes integers and scales.

        Args:
            weight: [out, in] int8 values, or uint8 nibbles [out, ceil(in / 2)] (low one first, stored plus 8). With
                nibbles and one scale per channel the number of inputs is taken to be even.
            scale: [out, in/g], or [out, 1] or [out] per channel.
            scheme: a Scheme or its name.
            bias: [out] or None.
        """
        scheme = Scheme.parse(scheme)
        for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
            if tensor is not None and tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}; CPU tensors are accepted")
        if weight.dim() != 2 or weight.dtype not in (torch.int8, torch.uint8):
            raise ValueError(
                f"weight is {weight.dtype} {list(weight.shape)}; int8 [out, in] or uint8 [out, in/2] is accepted"
            )
        out_features = weight.shape[0]
        in_features = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
        scheme.check_inputs(in_features, "weight")
        scale = scale.unsqueeze(-1) if scale.dim() == 1 else scale
        expected = scheme.weights.group.scale_shape(out_features, in_features)
        if tuple(scale.shape) != expected or not scale.is_floating_point():
            raise ValueError(
                f"scale is {scale.dtype} {list(scale.shape)}; a floating point {list(expected)} is accepted"
            )
        if bias is not None and tuple(bias.shape) != (out_features,):
            raise ValueError(f"bias is {list(bias.shape)}; [{out_features}] is accepted")
        packed = ops.pack(
            weight.unsqueeze(0),
            scale.unsqueeze(0),
            None if bias is None else bias.unsqueeze(0),
            in_features,
            scheme.group_size or -1,
            scheme.weights.element,
            ops.ROWS_PLAIN,
            "weight",
        )
        return cls(packed)

    @classmethod
    def quantize(cls, weight: Tensor, scheme: Scheme | str, bias: Tensor | None = None) -> QuantizedLinear:
        """Quantises a float weight [out, in], round to nearest."""
        scheme = Scheme.parse(scheme)
        return cls.from_quantized(*quantize_weight(weight, scheme), scheme, bias)

    def forward(self, x: Tensor, *, fp32_out: bool = False) -> Tensor:
        """[..., in] float32, bfloat16 or float16 -> [..., out] of the same dtype, or with ``fp32_out`` in fp32."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}; [..., {self.in_features}] is accepted")
        ops.refuse_gradient(x=x)
        return ops.linear(x, self.weight_packed, self.out_features, fp32_out)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"
