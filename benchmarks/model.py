"""Measures a model with the shape of Qwen3-30B-A3B but fewer layers: loading, memory, prefill, decode and its parts.

    python benchmarks/model.py                                     # 4 layers, w4a8-g128
    python benchmarks/model.py --layers 16 --linears w8a8 --cache  # head in 8 bits; also a second start from the cache

The checkpoint has random weights and is written to a temporary folder, or to ``--folder``, where it is kept. Loading is
measured in a separate process, so that the peak of memory is that of loading alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cpumoe
from cpumoe.bench.decoding import decode_times
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.formats.compressed_tensors import write_config
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import TensorFileWriter
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 4, 128, 151936
_DIFFERENT = 4  # matrices of each shape; the others repeat them, because speed does not depend on values


def write_checkpoint(folder: Path, layers: int, storage: LinearStorage) -> None:
    """Writes random weights as a quantiser would store them."""
    generator = torch.Generator().manual_seed(0)
    made: dict[tuple[int, int], list[dict[str, Tensor]]] = defaultdict(list)

    def linear(rows: int, columns: int, number: int) -> dict[str, Tensor]:
        pool = made[rows, columns]
        while len(pool) <= number % _DIFFERENT:
            weight = quantize_weight(normal(rows, columns), storage.scheme)
            pool.append(storage.encode(weight))
        return pool[number % _DIFFERENT]

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def layer_tensors(layer: int) -> dict[str, Tensor]:
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        linears = {
            f"{attention}.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        }
        for expert in range(NUM_EXPERTS):
            linears[f"{mlp}.experts.{expert}.gate_proj"] = (INTERMEDIATE, HIDDEN)
            linears[f"{mlp}.experts.{expert}.up_proj"] = (INTERMEDIATE, HIDDEN)
            linears[f"{mlp}.experts.{expert}.down_proj"] = (HIDDEN, INTERMEDIATE)
        out = {
            f"model.layers.{layer}.input_layernorm.weight": ones(HIDDEN),
            f"model.layers.{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{attention}.q_norm.weight": ones(HEAD_DIM),
            f"{attention}.k_norm.weight": ones(HEAD_DIM),
            f"{mlp}.gate.weight": normal(NUM_EXPERTS, HIDDEN),
        }
        for number, (name, (rows, columns)) in enumerate(linears.items()):
            out |= {f"{name}.{suffix}": tensor for suffix, tensor in linear(rows, columns, number).items()}
        return out

    outside = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    weight_map: dict[str, str] = {}
    for index in range(layers + 1):
        tensors = outside if index == 0 else layer_tensors(index - 1)
        shard = f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"
        weight_map |= dict.fromkeys(tensors, shard)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with TensorFileWriter(folder / shard, specs, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOPK,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": write_config({"Linear": storage}, ["lm_head", "re:.*mlp[.]gate$"]),
    }
    (folder / "config.json").write_text(json.dumps(config))


def memory_bytes(key: str) -> int:
    """Memory of this process: its peak for the key VmHWM, the present amount for VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def load(folder: Path, linears: str | None, cache: Path | None) -> tuple[Any, dict[str, float]]:
    """Loads the model and measures the time and the memory that it takes."""
    from cpumoe.integrations.transformers.plugin import load_model

    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    model = load_model(folder, linears=linears, cache=cache)
    seconds = time.perf_counter() - start
    packed = sum(b.numel() for b in model.buffers() if b.dtype == torch.uint8)
    model_bytes = packed + sum(p.numel() * p.element_size() for p in model.parameters())
    per_layer = packed // model.config.num_hidden_layers
    peak = memory_bytes("VmHWM") - before
    return model, {
        "seconds": seconds,
        "packed_gb": packed * 1e-9,
        "packed_gb_per_second": packed * 1e-9 / seconds,
        "model_gb": model_bytes * 1e-9,
        "peak_gb": peak * 1e-9,
        "peak_over_packed_and_layer": peak / (packed + per_layer),
    }


def load_figures(folder: Path, linears: str | None, cache: Path | None) -> dict[str, float]:
    """The figures of one load, measured in a separate process."""
    command = [sys.executable, __file__, "--folder", str(folder), "--load-only"]
    command += [] if linears is None else ["--linears", linears]
    command += [] if cache is None else ["--cache-folder", str(cache)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def generation_figures(model: Any, prompt: int, tokens: int) -> dict[str, Any]:
    """Prefill and decode rates, and the shares of a decoded token's time."""
    ids = torch.randint(0, VOCABULARY, (1, prompt), generator=torch.Generator().manual_seed(1))
    times = []
    with torch.inference_mode():
        model(ids[:, :32])
        for _ in range(3):
            start = time.perf_counter()
            model(ids, logits_to_keep=1)
            times.append(time.perf_counter() - start)
    decode = decode_times(model, ids, tokens)
    return {
        "prompt": prompt,
        "prefill_tokens_per_second": prompt / min(times),
        "decode_ms": decode.seconds * 1e3,
        "decode_tokens_per_second": 1 / decode.seconds,
        "decode_shares": decode.shares,
        "decode_share_outside_arithmetic": decode.outside,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scheme", default="w4a8-g128")
    parser.add_argument("--form", default="pack-quantized", choices=["pack-quantized", "int-quantized"])
    parser.add_argument("--linears", help="scheme for what the checkpoint has in float (the head)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="checkpoint folder: written if it is not there, and kept")
    parser.add_argument("--cache", action="store_true", help="also measure starts with the packed cache")
    parser.add_argument("--cache-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load-only", action="store_true", help="load, print the figures as JSON, and stop")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.load_only:
        print(json.dumps(load(arguments.folder, arguments.linears, arguments.cache_folder)[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "model"
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder, arguments.layers, storage_for(Scheme.parse(arguments.scheme), arguments.form))
        figures: dict[str, Any] = {"isa": cpumoe.isa(), "threads": cpumoe.get_num_threads()}
        figures["load"] = load_figures(folder, arguments.linears, None)
        if arguments.cache:
            cache = Path(scratch) / "cache"
            figures["load_writing_cache"] = load_figures(folder, arguments.linears, cache)
            figures["load_from_cache"] = load_figures(folder, arguments.linears, cache)
        model, _ = load(folder, arguments.linears, None)
        figures["generation"] = generation_figures(model, arguments.prompt, arguments.tokens)
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
