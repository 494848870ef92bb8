"""Times Mamba and Mamba2 layers beside transformers' own form, in one run and by turns.

.venv/bin/python benchmarks/state_space.py [granite-4-h-small nemotron-3-nano jamba-1.5-mini] [--tokens 2048]

A prompt: milliseconds between the two outer projections, which are the same for both, and of the whole layer. One
token: milliseconds of the whole layer, whose weights are in no cache, and the share of the memory's read rate at which
the bytes are read that have to be (projections, convolution, states). All times are the shortest of several.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

import cpumoe
from cpumoe.bench.measure import Limits, memory_to_probe
from cpumoe.integrations.transformers.replacements.state_space import speed_up_state_spaces

# The published sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-4-h-small": (
        "granitemoehybrid",
        {
            "hidden_size": 4096,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "layer_types": ["linear_attention"],
        },
    ),
    "nemotron-3-nano": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "layer_types": ["linear_attention"],
        },
    ),
    "jamba-1.5-mini": ("jamba", {"hidden_size": 4096, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 256}),
}

COPIES = 3  # layers that take turns, so that no weight is still in a cache


class Given(nn.Module):
    """A projection whose result is known."""

    def __init__(self, out: Tensor | None) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        return x if self.out is None else self.out


@dataclass
class Pair:
    """A layer in transformers' form and in ours, with the same tensors."""

    theirs: Any
    ours: Any


def mixer_class(architecture: str) -> type[nn.Module]:
    module = __import__(f"transformers.models.{architecture}.modeling_{architecture}", fromlist=["_"])
    names = [name for name in vars(module) if "Mamba" in name and (name.endswith(("Mixer", "MambaLayer")))]
    found: type[nn.Module] = getattr(module, names[0])
    return found


def make_pair(name: str) -> Pair:
    architecture, sizes = SHAPES[name]
    config = transformers.AutoConfig.for_model(architecture, num_hidden_layers=1, **sizes)
    with torch.no_grad():
        theirs: Any = mixer_class(architecture)(config, layer_idx=0).to(torch.bfloat16).eval()  # type: ignore[call-arg]
        ours: Any = mixer_class(architecture)(config, layer_idx=0).to(torch.bfloat16).eval()  # type: ignore[call-arg]
    for parameter_name, parameter in list(theirs.named_parameters()):
        parameter.requires_grad_(False)
        owner = ours.get_submodule(parameter_name.rpartition(".")[0])
        setattr(owner, parameter_name.rpartition(".")[2], parameter)
    speed_up_state_spaces(ours)
    if not isinstance(ours.forward, functools.partial):
        raise SystemExit(f"{name}: the layer was not recognised")
    return Pair(theirs, ours)


def new_cache() -> Cache:
    return Cache(layers=[LinearAttentionLayer()])


def best_ms(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(times) * 1e3 for name, times in seconds.items()}


def prompt(name: str, tokens: int, rounds: int) -> None:
    pair = make_pair(name)
    x = torch.randn(1, tokens, pair.ours.hidden_size).to(torch.bfloat16)
    whole = best_ms(
        {
            "theirs": lambda: pair.theirs(x, cache_params=new_cache()),
            "ours": lambda: pair.ours(x, cache_params=new_cache()),
        },
        rounds,
    )
    projected = pair.theirs.in_proj(x)
    for layer in (pair.theirs, pair.ours):
        layer.in_proj, layer.out_proj = Given(projected), Given(None)
    between = best_ms(
        {
            "theirs": lambda: pair.theirs(x, cache_params=new_cache()),
            "ours": lambda: pair.ours(x, cache_params=new_cache()),
        },
        rounds,
    )
    for what, times in (("between the projections", between), ("whole layer", whole)):
        ours, theirs = times["ours"], times["theirs"]
        print(f"{name}: {tokens} tokens, {what}: {ours:.1f} ms, transformers {theirs:.1f} ms: {theirs / ours:.1f}x")


def one_token(name: str, rounds: int) -> None:
    pairs = [make_pair(name) for _ in range(COPIES)]
    features = pairs[0].ours.hidden_size
    prefix, x = torch.randn(1, 8, features).to(torch.bfloat16), torch.randn(1, 1, features).to(torch.bfloat16)
    caches: dict[str, list[Cache]] = {"theirs": [], "ours": []}
    for pair in pairs:
        for which in caches:
            cache = new_cache()
            getattr(pair, which)(prefix, cache_params=cache)
            caches[which].append(cache)
    limits, memory = Limits(), memory_to_probe()
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    for i in range(rounds * COPIES):
        for which, times in seconds.items():
            start = time.perf_counter()
            getattr(pairs[i % COPIES], which)(x, cache_params=caches[which][i % COPIES])
            times.append(time.perf_counter() - start)
        if i % COPIES == 0:
            limits.probe(memory)
    dram = max(limits.bytes_per_second)
    layer, cache = pairs[0].ours, caches["ours"][0]
    state = cache.get_recurrent_state(0)
    read = sum(p.numel() * p.element_size() for p in layer.parameters()) + state.numel() * 4
    ours, theirs = min(seconds["ours"]), min(seconds["theirs"])
    print(
        f"{name}: one token: {ours * 1e3:.2f} ms, transformers {theirs * 1e3:.2f} ms: {theirs / ours:.1f}x; "
        f"{read / ours * 1e-9:.1f} GB/s of {dram * 1e-9:.1f}: {read / ours / dram:.0%}"
    )
    for pair in pairs:
        inputs = pair.theirs.in_proj(x)
        for each in (pair.theirs, pair.ours):
            each.in_proj, each.out_proj = Given(inputs), Given(None)
    inside: dict[str, list[float]] = {"theirs": [], "ours": []}
    for i in range(rounds * COPIES):
        for which, times in inside.items():
            memory.sum()  # pushes the states out of the caches, as the projections do
            start = time.perf_counter()
            getattr(pairs[i % COPIES], which)(x, cache_params=caches[which][i % COPIES])
            times.append(time.perf_counter() - start)
    ours, theirs = min(inside["ours"]), min(inside["theirs"])
    print(
        f"{name}: one token, between the projections: {ours * 1e6:.0f} us, transformers {theirs * 1e6:.0f} us; "
        f"state at {state.numel() * 4 / ours * 1e-9:.1f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="shape", help=f"of {', '.join(SHAPES)} (all)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.shapes if name not in SHAPES]:
        parser.error(f"shape {unknown[0]}; accepted are {', '.join(SHAPES)}")
    transformers.utils.logging.set_verbosity_error()
    print(f"{cpumoe.isa()}, {cpumoe.get_num_threads()} threads, bf16")
    with torch.no_grad():
        for name in arguments.shapes or SHAPES:
            one_token(name, arguments.rounds * 4)
            prompt(name, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
