"""The product of one token with a weight as it is, in fp32, bf16 or fp16."""

from __future__ import annotations

from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import aligned, register_into


def _token_linear_out(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _token_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _core.float_linear(aligned(x).view(1, -1), weight, bias, out.view(1, -1))


# x [.., in], of one token only, weight [out, in] of the same dtype, bias [out] fp32 -> [.., out]. Sums in fp32. PyTorch
# reads weights in 16 bits at half of the rate that memory has.
token_linear = register_into(
    "token_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _token_linear_out, _token_linear
)
