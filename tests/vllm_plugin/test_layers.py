"""Layers of vLLM that cpumoe serves: routing, activations, physical experts, and what is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

import cpumoe
from cpumoe.integrations.vllm import registration
from cpumoe.integrations.vllm.experts_method import ExpertsMethod
from cpumoe.integrations.vllm.served_configs import CompressedTensors
from cpumoe.integrations.vllm.served_experts import ServedExperts

_EXPERTS, _HIDDEN, _INNER, _TOKENS = 8, 128, 128, 9
_PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def config() -> Iterator[VllmConfig]:
    """One worker."""
    registration.register()
    made = VllmConfig(device_config=DeviceConfig("cpu"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield made
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def folder(cases: dict[str, Any]) -> Path:
    return Path(cases["int-quantized w4a8-g32"]["folder"])


def _quant_config(folder: Path) -> CompressedTensors:
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    made = CompressedTensors.from_config(section)
    made.maybe_update_config(str(folder))
    return made


def _empty_layer(config: VllmConfig, **options: Any) -> Any:
    """A layer of vLLM that waits for the tensors of its experts."""
    config.compilation_config.static_forward_context.pop(_PREFIX, None)
    config.compilation_config.static_all_moe_layers.clear()
    settings = {"num_experts": _EXPERTS, "top_k": 2, "hidden_size": _HIDDEN, "intermediate_size": _INNER}
    return FusedMoEFactory(**settings | options, prefix=_PREFIX, params_dtype=torch.float32)


def _layer(config: VllmConfig, folder: Path, **options: Any) -> Any:
    """A layer of vLLM with the experts of the first layer of a checkpoint."""
    runner = _empty_layer(config, quant_config=_quant_config(folder), **options)
    found = load_file(folder / "model.safetensors")
    weights = ((n.removeprefix(f"{_PREFIX}."), tensor) for n, tensor in found.items() if n.startswith(f"{_PREFIX}."))
    loaded = list(runner.load_weights(weights))
    assert loaded
    experts = runner.routed_experts
    experts.quant_method.process_weights_after_loading(experts)
    return runner


@contextmanager
def _running(config: VllmConfig) -> Iterator[None]:
    with set_forward_context(None, config, num_tokens=_TOKENS):
        yield


def _run(runner: Any, config: VllmConfig, x: Tensor, logits: Tensor) -> Tensor:
    with _running(config):
        result: Tensor = runner(x, logits)
    return result


# ---- routing ---------------------------------------------------------------------------------------------------------

_BIAS = torch.linspace(-0.4, 0.4, _EXPERTS)


def _chosen(scores: Tensor, choice: Tensor, topk: int, renormalize: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    ids = choice.topk(topk).indices
    weights = scores.gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * factor, ids


def _in_groups(scores: Tensor, choice: Tensor, has_bias: bool) -> Tensor:
    """Of 4 groups the best two take part."""
    grouped = choice.view(len(choice), 4, -1)
    worth = grouped.topk(2).values.sum(-1) if has_bias else grouped.amax(-1)
    kept = torch.zeros_like(worth).scatter_(1, worth.topk(2).indices, 1.0).repeat_interleave(_EXPERTS // 4, 1)
    return choice.masked_fill(kept == 0, -math.inf)


Route = Callable[[Tensor], tuple[Tensor, Tensor]]


def _llama4(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    scores, ids = gating_output.topk(topk)
    return torch.sigmoid(scores.float()), ids.to(torch.int32)


_ROUTES: dict[str, tuple[dict[str, Any], Route]] = {
    "softmax, renormalised": ({}, lambda g: _chosen(g.softmax(-1), g, 2, True)),
    "softmax": ({"renormalize": False}, lambda g: _chosen(g.softmax(-1), g, 2, False)),
    "sigmoid": ({"scoring_func": "sigmoid"}, lambda g: _chosen(g.sigmoid(), g, 2, True)),
    "sigmoid and a bias": (
        {"scoring_func": "sigmoid", "e_score_correction_bias": _BIAS, "routed_scaling_factor": 1.5},
        lambda g: _chosen(g.sigmoid(), g.sigmoid() + _BIAS, 2, True, 1.5),
    ),
    "DeepSeek-V3": (
        {
            "scoring_func": "sigmoid",
            "e_score_correction_bias": _BIAS,
            "use_grouped_topk": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        lambda g: _chosen(g.sigmoid(), _in_groups(g.sigmoid(), g.sigmoid() + _BIAS, True), 2, True, 2.5),
    ),
    "groups without a bias": (
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "renormalize": False},
        lambda g: _chosen(g.softmax(-1), _in_groups(g, g.softmax(-1), False), 2, False),
    ),
    "DeepSeek-V4": (
        {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": _BIAS, "routed_scaling_factor": 1.5},
        lambda g: _chosen(functional.softplus(g).sqrt(), functional.softplus(g).sqrt() + _BIAS, 2, True, 1.5),
    ),
    "Llama 4": (
        {"custom_routing_function": _llama4, "top_k": 1, "apply_router_weight_on_input": True},
        lambda g: _llama4(g, g, 1, False),
    ),
}


@pytest.mark.parametrize("name", _ROUTES)
def test_routing(name: str, config: VllmConfig, folder: Path) -> None:
    options, route = _ROUTES[name]
    runner = _layer(config, folder, **options)
    assert runner.is_monolithic
    x, logits = torch.randn(_TOKENS, _HIDDEN), torch.randn(_TOKENS, _EXPERTS)
    experts: cpumoe.Experts = runner.routed_experts.cpumoe_experts
    weights, ids = route(logits)
    on_input = options.get("apply_router_weight_on_input", False)
    expected = experts.reference(x, ids, weights, apply_router_weight_on_input=on_input)
    torch.testing.assert_close(_run(runner, config, x, logits), expected, rtol=1e-4, atol=1e-4)


def test_no_tokens(config: VllmConfig, folder: Path) -> None:
    runner = _layer(config, folder)
    assert _run(runner, config, torch.empty(0, _HIDDEN), torch.empty(0, _EXPERTS)).shape == (0, _HIDDEN)


# ---- activations -----------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, tuple[dict[str, Any], cpumoe.Activation]] = {
    "silu": ({"activation": "silu"}, cpumoe.Activation("silu")),
    "gelu": ({"activation": "gelu"}, cpumoe.Activation("gelu")),
    "gelu_tanh": ({"activation": "gelu_pytorch_tanh"}, cpumoe.Activation("gelu_tanh")),
    "swigluoai": ({"activation": "swigluoai"}, cpumoe.Activation("swiglu_oai")),
    "swigluoai in halves": (
        {"activation": "swigluoai_uninterleave", "swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 1.0},
        cpumoe.Activation("swiglu_oai", alpha=1.5, limit=5.0),
    ),
    "swiglustep": ({"activation": "swiglustep"}, cpumoe.Activation("swiglu_step")),
    "silu with a limit": (
        {"activation": "silu", "swiglu_limit": 0.5},
        cpumoe.Activation("swiglu_step", limit=0.5, gate_limit=0.5 / (1 + math.exp(-0.5))),
    ),
}


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_activations(name: str, config: VllmConfig, folder: Path) -> None:
    options, expected = _ACTIVATIONS[name]
    runner = _layer(config, folder, **options)
    assert runner.routed_experts.cpumoe_experts.config.activation == expected
    x, logits = torch.randn(_TOKENS, _HIDDEN), torch.randn(_TOKENS, _EXPERTS)
    weights, ids = _chosen(logits.softmax(-1), logits, 2, True)
    reference = runner.routed_experts.cpumoe_experts.reference(x, ids, weights)
    torch.testing.assert_close(_run(runner, config, x, logits), reference, rtol=1e-4, atol=1e-4)


def test_silu_with_a_limit_is_what_vllm_means_by_it(config: VllmConfig, folder: Path) -> None:
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    limit = 0.5
    activation = _ACTIVATIONS["silu with a limit"][1]
    rows = torch.randn(64, 32) * 2
    theirs = SiluAndMulWithClamp(limit, compile_native=False).forward_native(rows)
    gate, up = rows.chunk(2, -1)
    ours = functional.silu(gate).clamp(max=activation.parameters[0]) * up.clamp(-limit, limit)
    torch.testing.assert_close(ours, theirs)


def test_floats_that_vllm_has_no_kernel_for(config: VllmConfig) -> None:
    """vLLM's own method refuses this activation on CPUs when it is made, before it knows whose the layer is."""
    runner = _empty_layer(config, activation="swiglustep")
    linears = {name: torch.randn(_EXPERTS, _INNER, _HIDDEN) / 10 for name in ("gate_proj", "up_proj", "down_proj")}
    named = [(f"{expert}.{name}.weight", held[expert]) for expert in range(_EXPERTS) for name, held in linears.items()]
    assert list(runner.load_weights(named))
    experts = runner.routed_experts
    experts.quant_method.process_weights_after_loading(experts)
    x, logits = torch.randn(_TOKENS, _HIDDEN), torch.randn(_TOKENS, _EXPERTS)
    weights, ids = _chosen(logits.softmax(-1), logits, 2, True)
    gate, up, down = linears.values()
    hidden = functional.silu(torch.einsum("th,eih->tei", x, gate)).clamp(max=7.0)
    hidden = hidden * torch.einsum("th,eih->tei", x, up).clamp(-7.0, 7.0)
    every = torch.einsum("tei,ehi->teh", hidden, down)
    expected = (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, _HIDDEN)) * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(_run(runner, config, x, logits), expected, rtol=1e-3, atol=1e-3)


# ---- physical experts ------------------------------------------------------------------------------------------------


def test_physical_experts(config: VllmConfig, folder: Path) -> None:
    """Copies of experts, which vLLM's load balancer adds, and rows of packed weights, which it moves."""
    parallel = config.parallel_config
    object.__setattr__(parallel, "enable_eplb", True)  # vLLM does not offer it on CPUs
    try:
        runner = _layer(config, folder, enable_eplb=True, num_redundant_experts=2)
    finally:
        object.__setattr__(parallel, "enable_eplb", False)
    experts = runner.routed_experts
    assert not runner.is_monolithic  # which copy a token takes vLLM's router says
    held: cpumoe.Experts = experts.cpumoe_experts
    assert held.config.experts == _EXPERTS + 2
    x, weights = torch.randn(_TOKENS, _HIDDEN), torch.rand(_TOKENS, 2)

    def computed(*ids: int) -> Tensor:
        chosen = torch.tensor([ids] * _TOKENS)
        result: Tensor = experts.quant_method.apply(experts, x, weights, chosen)
        return result

    torch.testing.assert_close(computed(8, 9), computed(0, 1))  # the copies of the first two
    rows = list(experts.get_expert_weights())
    assert [len(row) for row in rows] == [_EXPERTS + 2] * 2
    expected = computed(5, 1)
    for row in rows:  # expert 5 to the place of the first copy
        row[8].copy_(row[5])
    torch.testing.assert_close(computed(8, 1), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_tensor_is_missing(config: VllmConfig, folder: Path) -> None:
    runner = _empty_layer(config, quant_config=_quant_config(folder))
    experts = runner.routed_experts
    assert isinstance(experts.quant_method, ExpertsMethod)
    found = load_file(folder / "model.safetensors")
    lost = f"{_PREFIX}.3.up_proj.weight_scale"
    held = ((n.removeprefix(f"{_PREFIX}."), t) for n, t in found.items() if n.startswith(_PREFIX) and n != lost)
    assert list(runner.load_weights(held))
    with pytest.raises(
        cpumoe.CheckpointError, match=r"1 missing: model\.layers\.0\.mlp\.experts\.3\.up\.weight_scale$"
    ):
        experts.quant_method.process_weights_after_loading(experts)


def test_reasons(config: VllmConfig, folder: Path) -> None:
    """What is not served is known before a tensor comes, when it can still be left to vLLM."""
    runner = _layer(config, folder)
    layer, storage = runner.routed_experts, _quant_config(folder)._storage_of(f"{_PREFIX}.0.up_proj")
    parallel = layer.moe_config.moe_parallel_config
    layer.moe_config.moe_parallel_config = replace(parallel, tp_size=8)
    with pytest.raises(cpumoe.UnsupportedScheme, match="the intermediate size 128 of the experts in 8 slices"):
        ServedExperts(layer, storage)
    layer.moe_config.moe_parallel_config = parallel
    layer.moe_config.is_lora_enabled = True
    with pytest.raises(cpumoe.UnsupportedScheme, match="adapters"):
        ServedExperts(layer, storage)
    layer.moe_config.is_lora_enabled = False
    config.load_config.load_format = "dummy"
    with pytest.raises(cpumoe.UnsupportedScheme, match="load format 'dummy'"):
        ServedExperts(layer, storage)
    config.load_config.load_format = "auto"
    with pytest.raises(cpumoe.CheckpointError, match="packed before, and cannot be loaded anew"):
        layer.quant_method.process_weights_after_loading(layer)
