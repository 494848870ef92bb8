"""Writes a checkpoint with random weights, as a quantiser would store them, or in float."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from model_shape import ModelShape
from torch import Tensor

from cpumoe.checkpoints.formats.compressed_tensors import write_config
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.checkpoints.tensor_file import TensorFileWriter
from cpumoe.layers.rounding import quantize_weight

_DIFFERENT = 4  # matrices of each shape; the others repeat them, because speed does not depend on values


def write_checkpoint(
    folder: Path, shape: ModelShape, storage: LinearStorage | None, head: LinearStorage | None = None
) -> None:
    """Writes the safetensors files, their index and config.json; the routers stay in float.

    Args:
        storage: of the linears of all layers; None for bf16.
        head: of the head; None for bf16.
    """
    generator = torch.Generator().manual_seed(0)
    made: dict[tuple[int, int], list[dict[str, Tensor]]] = defaultdict(list)

    def linear(rows: int, columns: int, number: int) -> dict[str, Tensor]:
        pool = made[rows, columns]
        while len(pool) <= number % _DIFFERENT:
            pool.append(encoded(normal(rows, columns), storage))
        return pool[number % _DIFFERENT]

    def encoded(weight: Tensor, storage: LinearStorage | None) -> dict[str, Tensor]:
        return {"weight": weight} if storage is None else storage.encode(quantize_weight(weight, storage.scheme))

    def normal(*sizes: int) -> Tensor:
        return (torch.randn(sizes, generator=generator) * 0.02).bfloat16()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def layer_tensors(layer: int) -> dict[str, Tensor]:
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        linears = {f"{attention}.{name}": sizes for name, sizes in shape.attention_linears.items()}
        for expert in range(shape.experts):
            linears[f"{mlp}.experts.{expert}.gate_proj"] = (shape.intermediate, shape.hidden)
            linears[f"{mlp}.experts.{expert}.up_proj"] = (shape.intermediate, shape.hidden)
            linears[f"{mlp}.experts.{expert}.down_proj"] = (shape.hidden, shape.intermediate)
        out = {
            f"model.layers.{layer}.input_layernorm.weight": ones(shape.hidden),
            f"model.layers.{layer}.post_attention_layernorm.weight": ones(shape.hidden),
            f"{attention}.q_norm.weight": ones(shape.head_dim),
            f"{attention}.k_norm.weight": ones(shape.head_dim),
            f"{mlp}.gate.weight": normal(shape.experts, shape.hidden),
        }
        for number, (name, (rows, columns)) in enumerate(linears.items()):
            out |= {f"{name}.{suffix}": tensor for suffix, tensor in linear(rows, columns, number).items()}
        return out

    outside = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones(shape.hidden),
    }
    for suffix, tensor in encoded(normal(shape.vocabulary, shape.hidden), head).items():
        outside[f"lm_head.{suffix}"] = tensor
    weight_map: dict[str, str] = {}
    for index in range(shape.layers + 1):
        tensors = outside if index == 0 else layer_tensors(index - 1)
        shard = f"model-{index + 1:05}-of-{shape.layers + 1:05}.safetensors"
        weight_map |= dict.fromkeys(tensors, shard)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with TensorFileWriter(folder / shard, specs, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.topk,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if storage is not None:
        storages = {"Linear": storage} if head is None else {"lm_head": head, "Linear": storage}
        ignored = ["re:.*mlp[.]gate$", *(["lm_head"] if head is None else [])]
        config["quantization_config"] = write_config(storages, ignored)
    (folder / "config.json").write_text(json.dumps(config))
