"""Writes a GGUF with random weights: experts and attention Q4_0, embedding and head Q8_0. Needs the package gguf.

    python llama_cpp_gguf.py FILE SHAPE     # the fields of ModelShape as JSON

It has the same shape as cpumoe's checkpoint, and 4.5 bits a weight where ``w4a8-g128`` has 4.125.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
from model_shape import ModelShape

_BLOCK = 32  # weights that share a scale
_DEVIATION = 0.02  # of the weights
# The standard deviation of integers that take all values alike.
_INTEGER_DEVIATION = {4: 4.6, 8: 74.0}
_NOT_USED = 6144  # intermediate size of dense layers, of which the model has none; the file must name one


def write_gguf(path: Path, shape: ModelShape) -> None:
    """Layers repeat the same matrices, because speed does not depend on values; each has its place in the file."""
    random = np.random.default_rng(0)
    kinds = {4: gguf.GGMLQuantizationType.Q4_0, 8: gguf.GGMLQuantizationType.Q8_0}
    made: dict[tuple[int, ...], Any] = {}
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(_NOT_USED)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.topk)
    writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    def blocks(*sizes: int, bits: int) -> Any:
        """Random blocks: an fp16 scale, then 16 or 32 bytes of integers."""
        count, values = int(np.prod(sizes)) // _BLOCK, _BLOCK * bits // 8
        data = np.empty((count, 2 + values), np.uint8)
        scale = np.float16(_DEVIATION / _INTEGER_DEVIATION[bits])
        data[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        data[:, 2:] = random.integers(0, 256, (count, values), dtype=np.uint8)
        return data.reshape(*sizes[:-1], -1)

    def add(name: str, *sizes: int, bits: int = 4) -> None:
        if (*sizes, bits) not in made:
            made[(*sizes, bits)] = blocks(*sizes, bits=bits)
        writer.add_tensor(name, made[(*sizes, bits)], raw_dtype=kinds[bits])

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    add("token_embd.weight", shape.vocabulary, shape.hidden, bits=8)
    add("output.weight", shape.vocabulary, shape.hidden, bits=8)
    add_norm("output_norm.weight", shape.hidden)
    attention = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        for norm, size in zip(("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"), shape.norm_sizes, strict=True):
            add_norm(f"{prefix}{norm}.weight", size)
        for name, sizes in shape.attention_linears.items():
            add(f"{prefix}{attention[name]}.weight", *sizes)
        router = random.standard_normal((shape.experts, shape.hidden), dtype=np.float32) * np.float32(_DEVIATION)
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
        add(f"{prefix}ffn_gate_exps.weight", shape.experts, shape.intermediate, shape.hidden)
        add(f"{prefix}ffn_up_exps.weight", shape.experts, shape.intermediate, shape.hidden)
        add(f"{prefix}ffn_down_exps.weight", shape.experts, shape.hidden, shape.intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), ModelShape(**json.loads(sys.argv[2])))
