"""Steps over keys and values in bf16 and in int8, in turn: ``python benchmarks/int8_cache.py``.

Layers have the heads of known models and next to nothing else, so that a step is attention. Medians of several rounds,
by the clock on the wall: what a step counts for its parts is wrong where its first thread has to wait for a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from cpumoe.cli.arguments import add_threads, use_threads
from cpumoe.ops import decoder, to_cache_records
from cpumoe.ops.decoder_steps import Decoder, LayerCache

_HIDDEN, _VOCABULARY = 64, 100
_CACHED_BYTES = 64 << 20  # of bf16 in all layers, so that a step does not find them in the processor's caches


@dataclass(frozen=True)
class _Heads:
    heads: int
    kv_heads: int
    depth: int
    latent: tuple[int, int, int, int] | None = None  # rank, nope, rotated, depth of values

    @property
    def cached(self) -> tuple[int, ...]:
        """Numbers that a head of a token has in each tensor of a cache."""
        return (self.depth, self.depth) if self.latent is None else (self.latent[0] + self.latent[2],)


_MODELS = {
    "Qwen3-30B-A3B": _Heads(32, 4, 128),
    "gpt-oss-20b": _Heads(64, 8, 64),
    "DeepSeek-V2-Lite": _Heads(16, 1, 192, (512, 128, 64, 128)),
}


def _matrix(rows: int, columns: int) -> decoder.Matrix:
    return decoder.Matrix((torch.randn(rows, columns) * 0.05).bfloat16())


def _attention(h: _Heads) -> decoder.Attention:
    query = _matrix(h.heads * h.depth, _HIDDEN)
    if h.latent is None:
        key, value = (_matrix(h.kv_heads * h.depth, _HIDDEN) for _ in range(2))
        sizes = {"heads": h.heads, "kv_heads": h.kv_heads, "head_dim": h.depth, "value_dim": h.depth}
        out = _matrix(_HIDDEN, h.heads * h.depth)
        return decoder.Gqa(query=query, key=key, value=value, out=out, scale=0.1, **sizes)
    rank, nope, rotated, depth = h.latent
    return decoder.Mla(
        query=query,
        out=_matrix(_HIDDEN, h.heads * depth),
        heads=h.heads,
        value_dim=depth,
        scale=0.1,
        query_down=None,
        query_down_norm=None,
        latent=_matrix(rank + rotated, _HIDDEN),
        latent_norm=None,
        expansion=_matrix(h.heads * (nope + depth), rank).weight,
        kv_lora_rank=rank,
        nope_dim=nope,
        rope_dim=rotated,
    )


def _decoder(h: _Heads, layers: int) -> Decoder:
    silu = decoder.Activation(0, True, 1.702, 7.0)
    made = tuple(
        decoder.Layer(_attention(h), None, decoder.DenseBlock(*(_matrix(_HIDDEN, _HIDDEN) for _ in range(3)), silu))
        for _ in range(layers)
    )
    embedding = _matrix(_VOCABULARY, _HIDDEN).weight
    return Decoder(decoder.DecoderModel(embedding, 1.0, (), made, None, None))


def _caches(h: _Heads, layers: int, room: int, *, records: bool) -> list[LayerCache]:
    found = []
    for _ in range(layers):
        numbers = [torch.randn(1, h.kv_heads, room, depth).bfloat16() for depth in h.cached]
        held = [to_cache_records(part) for part in numbers] if records else numbers
        found.append((*held, 0))
    return found


def _seconds(h: _Heads, past: int, tokens: int, rounds: int) -> list[float]:
    """Of one layer, over bf16 and over int8."""
    layers = max(1, _CACHED_BYTES // (past * h.kv_heads * sum(h.cached) * 2)) if tokens == 1 else 1
    computed, ids = _decoder(h, layers), torch.randint(0, _VOCABULARY, (1, tokens))
    caches = [_caches(h, layers, past + tokens, records=records) for records in (False, True)]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for cache, times in zip(caches, seconds, strict=True):
            start = time.perf_counter()
            computed.step(ids, cache, past, keep=1)
            times.append((time.perf_counter() - start) / layers)
    return [statistics.median(times[1:]) for times in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    add_threads(parser)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        use_threads(arguments.threads)
    torch.manual_seed(0)
    for name, heads in _MODELS.items():
        for past, tokens in ((4096, 1), (16384, 1), (2048, 512)):
            floats, records = _seconds(heads, past, tokens, arguments.rounds)
            print(
                f"{name}: {tokens} tokens behind {past}: {floats * 1e3:.2f} ms over bf16, {records * 1e3:.2f} over "
                f"int8 ({records / floats:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
