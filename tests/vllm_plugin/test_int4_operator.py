"""vLLM's 4-bit operator under its own name, which vLLM has on Arm alone; its other CPU kernels' cases for our layers.

Sizes and tolerances are those of vLLM's tests of these kernels.
"""

from __future__ import annotations

import math
import platform

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import cpumoe
from cpumoe.layers import reference

pytestmark = pytest.mark.skipif(platform.machine() == "aarch64", reason="vLLM's own kernel is there")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    from cpumoe.integrations.vllm.registration import register

    register()


def _routed(tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """Weights, and ids as vLLM's router gives them."""
    scores = torch.randn(tokens, experts, dtype=torch.bfloat16).softmax(-1, dtype=torch.float32)
    weights, ids = scores.topk(topk)
    return weights, ids


def _in_float(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, act: object = None) -> Tensor:
    """The layer with weights in float; gate rows before up rows."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(gate_up)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].T).chunk(2, -1)
        hidden = functional.silu(gate) * up if act is None else act(gate, up)  # type: ignore[operator]
        out.index_add_(0, token, (hidden @ down[expert].T) * weights[token, slot].unsqueeze(-1))
    return out


def _int4(experts: int, rows: int, columns: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales, and both in float."""
    values = torch.randint(-8, 8, (experts, rows, columns), dtype=torch.int8)
    groups = 1 if group_size == -1 else columns // group_size
    dtype = torch.float32 if group_size == -1 else torch.bfloat16
    scales = torch.rand(experts, rows, groups, dtype=dtype) * 0.01
    return values, scales, values * scales.float().repeat_interleave(columns // groups, -1)


@pytest.mark.parametrize("tokens", [1, 2, 64, 128])
@pytest.mark.parametrize(
    ("inner", "hidden", "experts", "topk", "group_size"),
    [(256, 512, 8, 2, 128), (256, 512, 8, 2, 64), (256, 512, 8, 2, -1), (512, 256, 8, 4, 128), (512, 512, 8, 2, 128),
     (768, 2048, 8, 2, 128), (768, 2048, 16, 4, 64)],
)  # fmt: skip
def test_as_vllm_packs_it(tokens: int, inner: int, hidden: int, experts: int, topk: int, group_size: int) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.w4a8_int8 import convert_to_w4a8_int8_moe_format

    gate_up, gate_up_scale, gate_up_float = _int4(experts, 2 * inner, hidden, group_size)
    down, down_scale, down_float = _int4(experts, hidden, inner, group_size)
    packed = convert_to_w4a8_int8_moe_format(gate_up, down, gate_up_scale, down_scale, group_size)[:2]
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16) / math.sqrt(hidden)
    weights, ids = _routed(tokens, experts, topk)
    expected = _in_float(x, gate_up_float, down_float, weights, ids)
    operator = torch.ops._C.dynamic_4bit_int_moe
    for kind in (0, 2):
        found = operator(x, ids, weights, *packed, hidden, inner, group_size, False, kind)
        torch.testing.assert_close(found, expected.bfloat16(), atol=2e-2, rtol=2e-2)
        # Far closer than that: what 8-bit activations cost.
        assert float((found.float() - expected).norm() / expected.norm()) < 0.02
    oai = _in_float(x, gate_up_float, down_float, weights, ids, _swiglu_oai)
    found = operator(x, ids, weights, *packed, hidden, inner, group_size, False, 1)
    torch.testing.assert_close(found, oai.bfloat16(), atol=2e-2, rtol=2e-2)


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def test_biases_and_weights_on_input() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.w4a8_int8 import convert_to_w4a8_int8_moe_format

    gate_up, gate_up_scale, _ = _int4(4, 128, 128, 32)
    down, down_scale, _ = _int4(4, 128, 64, 32)
    biases = torch.randn(4, 128), torch.randn(4, 128)
    packed = convert_to_w4a8_int8_moe_format(gate_up, down, gate_up_scale, down_scale, 32, *biases)[:2]
    experts = cpumoe.Experts.from_quantized(
        gate_up, gate_up_scale, down, down_scale, "w4a8-g32", gate_up_bias=biases[0], down_bias=biases[1]
    )
    x, (weights, ids) = torch.randn(5, 128), _routed(5, 4, 2)
    for on_input in (False, True):
        found = torch.ops._C.dynamic_4bit_int_moe(x, ids, weights, *packed, 128, 64, 32, on_input, 0)
        torch.testing.assert_close(found, experts(x, ids, weights, apply_router_weight_on_input=on_input))


def test_packed_weights_of_ours_and_refusals() -> None:
    gate_up, gate_up_scale, _ = _int4(4, 128, 128, 32)
    down, down_scale, _ = _int4(4, 128, 64, 32)
    experts = cpumoe.Experts.from_quantized(gate_up, gate_up_scale, down, down_scale, "w4a8-g32")
    x, (weights, ids) = torch.randn(5, 128), _routed(5, 4, 2)
    packed = experts.get_buffer("gate_up_packed"), experts.get_buffer("down_packed")
    operator = torch.ops._C.dynamic_4bit_int_moe
    assert torch.equal(operator(x, ids, weights, *packed, 128, 64, 32, False, 2), experts(x, ids, weights))
    with pytest.raises(ValueError, match="gate_up_packed was packed with group_size=32, but the call says 64"):
        operator(x, ids, weights, *packed, 128, 64, 64, False, 2)
    with pytest.raises(
        ValueError, match=r"w13_packed is torch.float32 \[4, 7\]; packed weights, or float32 \[experts, "
    ):
        operator(x, ids, weights, torch.zeros(4, 7), packed[1], 128, 64, 32, False, 2)
    with pytest.raises(ValueError, match="activation_kind=3"):
        operator(x, ids, weights, *packed, 128, 64, 32, False, 3)


# ---- the cases of vLLM's fused experts of other schemes --------------------------------------------------------------


def _close_to_float(experts: cpumoe.Experts, x: Tensor, topk: int, tolerance: float, act: object = None) -> None:
    """Against the same weights in float, with the tolerance that vLLM's kernels are held to."""
    weights, ids = _routed(len(x), experts.config.experts, topk)
    held = experts.quantized()
    dense = [torch.stack([reference.dequantize(w[e]) for e in range(len(w.values))]) for w in (held.gate_up, held.down)]
    expected = _in_float(x, *dense, weights, ids, act)
    torch.testing.assert_close(experts(x, ids, weights), expected.to(x.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 64, 121])
@pytest.mark.parametrize(("inner", "hidden", "topk"), [(256, 512, 2), (512, 256, 4), (512, 512, 4), (768, 2048, 2)])
def test_block_fp8(tokens: int, inner: int, hidden: int, topk: int) -> None:
    """Weights of 8-bit floats in blocks, activations in float."""

    def codes(*size: int) -> Tensor:
        return (torch.randn(8, *size) * 448).clamp(-448, 448).to(torch.float8_e4m3fn)

    def scales(rows: int, columns: int) -> Tensor:
        return torch.rand(8, rows // 128, columns // 128) * 1e-3 + 1e-6

    experts = cpumoe.Experts.from_quantized(
        codes(2 * inner, hidden), scales(2 * inner, hidden), codes(hidden, inner), scales(hidden, inner), "fp8a16-block"
    )
    _close_to_float(experts, torch.randn(tokens, hidden, dtype=torch.bfloat16) / math.sqrt(hidden), topk, 1e-2)


@pytest.mark.parametrize("tokens", [1, 2, 32, 121])
@pytest.mark.parametrize(
    ("inner", "hidden", "experts", "topk"), [(128, 128, 4, 2), (256, 256, 8, 4), (352, 256, 8, 4), (512, 320, 8, 4)]
)
@pytest.mark.parametrize("scheme", ["mxfp4a16", "w4a16-g32", "w4a16-g32-asym"])
def test_weights_of_4_bits(scheme: str, tokens: int, inner: int, hidden: int, experts: int, topk: int) -> None:
    gate_up, down = torch.randn(experts, 2 * inner, hidden) / 10, torch.randn(experts, hidden, inner) / 10
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16) / 10
    _close_to_float(cpumoe.Experts.quantize(gate_up, down, scheme), x, topk, 1e-2)


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize(("inner", "hidden"), [(128, 128), (64, 64)])
def test_gpt_oss(tokens: int, inner: int, hidden: int) -> None:
    gate_up, down = torch.randn(4, 2 * inner, hidden) / 10, torch.randn(4, hidden, inner) / 10
    experts = cpumoe.Experts.quantize(gate_up, down, "mxfp4a16", activation="swiglu_oai")
    _close_to_float(experts, torch.randn(tokens, hidden, dtype=torch.bfloat16) / 10, 2, 1e-2, _swiglu_oai)


@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize(("inner", "hidden"), [(128, 128), (2880, 128), (128, 2880)])
def test_floats(tokens: int, inner: int, hidden: int) -> None:
    gate_up = torch.randn(8, 2 * inner, hidden, dtype=torch.bfloat16) / (0.5 * hidden**0.5)
    down = torch.randn(8, hidden, inner, dtype=torch.bfloat16) / (0.5 * inner**0.5)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16) / (0.5 * hidden**0.5)
    experts = cpumoe.Experts.from_quantized(gate_up, None, down, None, "bf16")
    _close_to_float(experts, x, 4, 1.6e-2)  # vLLM's for bf16


@pytest.mark.parametrize("tokens", [1, 2, 64, 121])
def test_int8(tokens: int) -> None:
    gate_up, down = torch.randn(8, 512, 256) / 16, torch.randn(8, 256, 256) / 16
    x = torch.randn(tokens, 256, dtype=torch.bfloat16) / 16
    _close_to_float(cpumoe.Experts.quantize(gate_up, down, "w8a8"), x, 4, 2e-2)
