"""Times latent attention of one token, whole module, beside transformers' own form in the same run.

    python benchmarks/latent_attention.py [--tokens 2048] [--threads 2] [--shape deepseek-v3]

The share is that of the DRAM read rate, measured between the calls, for the bytes that must be read: the weights of all
projections in bf16, and the latents.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite

from cpumoe import _core
from cpumoe.integrations.transformers.loading.install import speed_up
from cpumoe.tables import aligned

_PROBE_BYTES = 256 << 20
_BYTES_OF_LAYERS = 400 << 20  # so many layers that none of them stays in a cache

#: The published sizes are the defaults of the config classes.
_SHAPES: dict[str, tuple[str, type[nn.Module], type[nn.Module]]] = {
    "deepseek-v3": (
        "deepseek_v3",
        modeling_deepseek_v3.DeepseekV3Attention,
        modeling_deepseek_v3.DeepseekV3RotaryEmbedding,
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        modeling_glm4_moe_lite.Glm4MoeLiteAttention,
        modeling_glm4_moe_lite.Glm4MoeLiteRotaryEmbedding,
    ),
}


class Layers(nn.Module):
    """Some attentions of a model, and what gives them positions."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        family, attention, rotary = _SHAPES[shape]
        self.config = CONFIG_MAPPING[family]()
        self.config._attn_implementation = "sdpa"
        with torch.device("meta"):
            self.bytes_each = 2 * sum(p.numel() for p in attention(self.config, 0).parameters())
        count = max(2, _BYTES_OF_LAYERS // self.bytes_each)
        self.layers = nn.ModuleList(attention(self.config, i) for i in range(count)).to(torch.bfloat16).eval()
        self.rotary_emb = rotary(self.config)

    def filled_cache(self, tokens: int) -> DynamicCache:
        cache = DynamicCache(config=self.config)
        for layer in range(len(self.layers)):
            widths = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
            cache.update(*(torch.randn(1, 1, tokens, width).to(torch.bfloat16) for width in widths), layer)
        return cache

    def step(self, layer: int, hidden: Tensor, tokens: int, cache: DynamicCache, *, original: bool) -> float:
        """Seconds of one token behind ``tokens``; the cache is as before afterwards."""
        module: Any = self.layers[layer]
        new = hidden.shape[1]
        positions = self.rotary_emb(hidden, torch.arange(tokens, tokens + new)[None])
        start = time.perf_counter()
        if original:
            type(module).forward(module, hidden, positions, None, past_key_values=cache)
        else:
            module(hidden, positions, None, past_key_values=cache)
        seconds = time.perf_counter() - start
        cache.layers[layer].crop(-new)
        return seconds


def measure(shape: str, tokens: int, calls: int) -> list[str]:
    """One row of the table."""
    layers = Layers(shape)
    speed_up(layers)
    hidden = torch.randn(1, 1, layers.config.hidden_size).to(torch.bfloat16)
    cache = layers.filled_cache(tokens)
    memory = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    latent = layers.config.kv_lora_rank + layers.config.qk_rope_head_dim
    must_read = layers.bytes_each + 2 * latent * tokens
    ours, theirs, rates = [], [], []
    for call in range(calls):
        layer = call % len(layers.layers)
        ours.append(layers.step(layer, hidden, tokens, cache, original=False))
        if call % 8 == 0:
            rates.append(_core.read_rate(memory))
            theirs.append(layers.step(layer, hidden, tokens, cache, original=True))
    best, rate = min(ours), max(rates)
    return [
        shape,
        str(tokens),
        f"{best * 1e3:.2f}",
        f"{sorted(ours)[len(ours) // 2] * 1e3:.2f}",
        f"{min(theirs) * 1e3:.1f}",
        f"{must_read / 1e6:.0f}",
        f"{rate / 1e9:.1f}",
        f"{must_read / best / rate:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="how many tokens are in the cache")
    parser.add_argument("--shape", choices=_SHAPES, nargs="+", default=list(_SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--calls", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [["shape", "tokens", "ms", "median", "transformers", "MB", "DRAM GB/s", "share"]]
    with torch.no_grad():
        for shape in arguments.shape:
            rows += [measure(shape, tokens, arguments.calls) for tokens in arguments.tokens]
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
