"""Layers with a recurrent state (gated delta nets, Kimi delta attention, short convolutions) beside transformers' own.

.venv/bin/python benchmarks/linear_attention.py [--threads 2] [--tokens 2048] [--layers 4] [--families Qwen3-Next]

For each family one layer of a released model's shape with random weights in bf16: one token behind any context, and a
prompt. Times are minima of calls in turn. With one token several layers take turns, so that weights and states come
from memory, and what must be read and written (weights of the projections, states) is given as a share of the DRAM read
rate measured between the calls. "between" is a layer without its projections, which are PyTorch's in both.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

import cpumoe
from cpumoe import _core
from cpumoe.integrations.transformers.replacements.recurrent import speed_up_linear_attention
from cpumoe.tables import aligned


@dataclass(frozen=True)
class Family:
    """Where a layer's class is, and the options of the config that give a released model's shape."""

    name: str
    package: str
    config: str
    layer: str
    width: int
    options: dict[str, Any]

    def make(self) -> nn.Module:
        path = f"transformers.models.{self.package}"
        config = getattr(importlib.import_module(f"{path}.configuration_{self.package}"), self.config)(**self.options)
        layer: nn.Module = getattr(importlib.import_module(f"{path}.modeling_{self.package}"), self.layer)(config, 0)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)  # some classes leave them to the model's initialisation
            for name, parameter in layer.named_parameters():
                if name.endswith("A_log"):
                    parameter.uniform_(0.0, 2.0)
        return layer.to(torch.bfloat16).eval()


FAMILIES = (
    Family("Qwen3-Next", "qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet", 2048, {}),
    Family("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet", 2048, {}),
    Family("Kimi-Linear", "kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", 2304, {"hidden_size": 2304}),
    Family("LFM2-8B-A1B", "lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeShortConv", 2048, {"layer_types": ["conv"] * 32}),
)


def empty_cache() -> Cache:
    return Cache(layers=[LinearAttentionLayer()])


def in_turn(calls: list[Callable[[], object]], seconds: float, least: int) -> list[float]:
    """The shortest time of each call, in seconds; they are made one after the other, again and again."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    for round_ in itertools.count():
        if round_ >= least and time.perf_counter() > end:
            return best
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    raise AssertionError


def projections_of(layer: nn.Module) -> list[nn.Module]:
    return [m for m in layer.modules() if isinstance(m, nn.Linear | cpumoe.QuantizedLinear)]


def bytes_of(layer: nn.Module, cache: Cache) -> int:
    """What a token must read, and of the states also write."""
    held = cache.layers[0]
    states = [t for t in (*held.conv_states.values(), *held.recurrent_states.values()) if t is not None]
    tensors = [t for m in projections_of(layer) for t in (*m.parameters(), *m.buffers())]
    return sum(t.nbytes for t in tensors) + 2 * sum(t.nbytes for t in states)


def packed(layer: nn.Module, scheme: str) -> nn.Module:
    """A copy with the projections quantised, but for those that are too narrow to matter."""
    layer = copy.deepcopy(layer)
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear) and module.out_features >= 256:
            parent, _, leaf = name.rpartition(".")
            linear = cpumoe.QuantizedLinear.quantize(module.weight.float(), scheme)
            setattr(layer.get_submodule(parent), leaf, linear)
    return layer


def decode(layers: list[nn.Module], x: Tensor) -> tuple[float, float, int, float]:
    """Seconds of a token through a stock layer and through ours, bytes, and bytes per second of DRAM."""
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    token, rates = x[:, :1].contiguous(), []
    caches = [empty_cache() for _ in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer(x[:, :8], cache)

    def stock(layer: Any, cache: Cache) -> Callable[[], object]:
        return lambda: type(layer).forward(layer, token, cache)

    def ours(layer: Any, cache: Cache) -> Callable[[], object]:
        return lambda: layer(token, cache)

    best = [float("inf")] * 2
    for _ in range(5):
        for i, kind in enumerate((stock, ours)):
            calls = [kind(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
            best[i] = min(best[i], *in_turn(calls, 0.4, 2))
        rates.append(_core.read_rate(memory))
    return best[0], best[1], bytes_of(layers[0], caches[0]), max(rates)


def prefill(layer: nn.Module, x: Tensor) -> tuple[float, float, float]:
    """Seconds of a prompt through a stock layer, through ours, and of the projections alone."""
    inputs: dict[nn.Module, Tensor] = {}
    hooks = [m.register_forward_pre_hook(lambda m, a: inputs.update({m: a[0]})) for m in projections_of(layer)]
    layer(x, empty_cache())
    for hook in hooks:
        hook.remove()

    def projections() -> None:
        for module, given in inputs.items():
            module(given)

    calls = [lambda: type(layer).forward(layer, x, empty_cache()), lambda: layer(x, empty_cache()), projections]
    return tuple(in_turn(calls, 3.0, 3))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4, help="that take turns with one token")
    parser.add_argument("--packed", default="w8a8", help="scheme of the second line of each family")
    parser.add_argument("--families", nargs="+", default=[f.name for f in FAMILIES])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    tokens = [["one token", "stock ms", "ours ms", "", "MB", "GB/s", "DRAM GB/s", "share"]]
    prompts = [[f"{arguments.tokens} tokens", "stock ms", "ours ms", "", "between: stock", "ours", ""]]
    with torch.no_grad():
        for family in (f for f in FAMILIES if f.name in arguments.families):
            layers = [family.make() for _ in range(arguments.layers)]
            x = torch.randn(1, arguments.tokens, family.width).to(torch.bfloat16)
            for kind, some in (("bf16", layers), (arguments.packed, [packed(m, arguments.packed) for m in layers])):
                for layer in some:
                    speed_up_linear_attention(layer)
                stock, ours, size, dram = decode(some, x)
                rate = size / ours
                times = (f"{stock * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{stock / ours:.1f}x")
                rates = (f"{size / 1e6:.1f}", f"{rate / 1e9:.1f}", f"{dram / 1e9:.1f}", f"{rate / dram:.0%}")
                tokens.append([f"{family.name} {kind}", *times, *rates])
            stock, ours, linears = prefill(layers[0], x)
            between = (stock - linears) / (ours - linears)
            times = (f"{stock * 1e3:.0f}", f"{ours * 1e3:.0f}", f"{stock / ours:.1f}x")
            rest = (f"{(stock - linears) * 1e3:.0f}", f"{(ours - linears) * 1e3:.0f}", f"{between:.1f}x")
            prompts.append([family.name, *times, *rest])
    for table in (tokens, prompts):
        print("\n".join(aligned(table, right=range(1, 8))), end="\n\n")


if __name__ == "__main__":
    main()
