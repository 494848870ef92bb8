"""Small random models of every architecture, as float checkpoints and as compressed-tensors ones.

The quantised files are written here with nothing of the package but the rounding of weights, so that its reader is not
tested against its own writer.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # with the usual 0.02 all logits are alike and rounding decides which is the largest
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}

_DENSE_FIRST: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

#: model_type -> what differs from the common sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 6,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16},
    "olmoe": {"intermediate_size": 32, "num_experts": 8},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4},
    "deepseek_v2": {
        **_LATENT_ATTENTION,
        **_DENSE_FIRST,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**_LATENT_ATTENTION, **_DENSE_FIRST, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**_DENSE_FIRST, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "intermediate_size": 64,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,  # the first layer is dense
    },
}

#: Where Mixtral's experts may be: path, and names of gate, up and down.
MIXTRAL_SPELLINGS = {
    "w123": ("block_sparse_moe", ("w1", "w3", "w2")),
    "block_sparse_moe": ("block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
    "mlp": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}

_ROUTERS = re.compile(r"(mlp|block_sparse_moe)\.(gate|router)$|feed_forward\.router$|shared_expert_gate$")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write_float(
    folder: Path, architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Writes a float model; ``changes`` are values of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**_COMMON, **ARCHITECTURES[architecture], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                # Biases start as zeros and norms as ones: one that is lost or swapped would not be noticed.
                if (tensor.dim() == 1 and "inv_freq" not in name) or name.endswith("_bias"):
                    tensor += 0.1 * torch.randn_like(tensor)
    model.to(dtype).save_pretrained(folder)
    return folder


def apart(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Tensors of a float checkpoint with one linear per expert and projection, ``....experts.N.gate_proj.weight``."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if model_type == "mixtral":
            path, (gate, up, down) = MIXTRAL_SPELLINGS["w123"]
            name = name.replace(f".{path}.", ".mlp.")
            for theirs, ours in zip((gate, up, down), _PROJECTIONS, strict=True):
                name = name.replace(f".{theirs}.", f".{ours}.")
            out[name] = tensor
        elif re.fullmatch(r"(gate_up|down)_proj(_bias)?", last):  # all experts in one
            suffix = "bias" if last.endswith("_bias") else "weight"
            for expert, part in enumerate(tensor):
                columns = part if suffix == "bias" else part.T  # [out, in] or [out]
                linear = f"{prefix}.{expert}"
                if last.startswith("down"):
                    out[f"{linear}.down_proj.{suffix}"] = columns
                else:
                    halves = (columns[0::2], columns[1::2]) if model_type == "gpt_oss" else columns.chunk(2)
                    for projection, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                        out[f"{linear}.{projection}.{suffix}"] = half
        else:
            out[name] = tensor
    return {name: tensor.contiguous() for name, tensor in out.items()}


def together(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The reverse of ``apart``: what transformers writes for a float model."""
    if model_type == "mixtral":
        return respelled(tensors, "w123")
    if model_type not in ("gpt_oss", "llama4_text"):
        return tensors
    out, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)", name):
            experts.setdefault(match[1], {})[int(match[2]), match[3], match[4]] = tensor
        else:
            out[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(expert for expert, _, _ in parts)
        for suffix in ("weight", "bias") if model_type == "gpt_oss" else ("weight",):
            gate, up, down = (torch.stack([parts[e, p, suffix] for e in range(count)]) for p in _PROJECTIONS)
            gate_up = torch.stack((gate, up), 2).flatten(1, 2) if model_type == "gpt_oss" else torch.cat((gate, up), 1)
            last = "" if suffix == "weight" else "_bias"
            for name, tensor in ((f"gate_up_proj{last}", gate_up), (f"down_proj{last}", down)):
                out[f"{prefix}.{name}"] = (tensor.transpose(1, 2) if suffix == "weight" else tensor).contiguous()
    return out


def respelled(tensors: dict[str, Tensor], spelling: str) -> dict[str, Tensor]:
    """Mixtral's tensors (as ``apart`` gives them) under the names of another spelling."""
    path, names = MIXTRAL_SPELLINGS[spelling]

    def name_of(name: str) -> str:
        name = name.replace(".mlp.", f".{path}.")
        for ours, theirs in zip(_PROJECTIONS, names, strict=True):
            name = re.sub(rf"(experts\.\d+\.){ours}\.", rf"\1{theirs}.", name)
        return name

    return {name_of(name): tensor for name, tensor in tensors.items()}


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear that llm-compressor would quantise with lm_head in ``ignore``."""
    module, _, last = name.rpartition(".")
    return (
        last == "weight" and tensor.dim() == 2 and not _ROUTERS.search(module) and "embed" not in module
    ) and module != "lm_head"


def packed_words(values: Tensor, bits: int) -> Tensor:
    """int8 [rows, columns] -> int32 words, element j in word j / (32 / bits), low bits first, plus 2**(bits - 1)."""
    per_word = 32 // bits
    rows, columns = values.shape
    shifted = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    shifted[:, :columns] = values.to(torch.int64) + (1 << (bits - 1))
    words = (shifted.view(rows, -1, per_word) << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantized_tensors(
    tensors: dict[str, Tensor], scheme: str, form: str, scale_dtype: torch.dtype | None = torch.bfloat16
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors with one linear per expert -> as compressed-tensors stores them, and the same dequantised in float."""
    parsed = Scheme.parse(scheme)
    stored, dequantized = {}, {}
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor):
            stored[name] = dequantized[name] = tensor
            continue
        weight = quantize_weight(tensor.float(), parsed)
        if parsed.weights.element == "fp4":
            parts, dequantized[name] = stored_fp4(weight)
        else:
            dtype = weight.scales.dtype if scale_dtype is None else scale_dtype
            parts, dequantized[name] = stored_integers(replace(weight, scales=weight.scales.to(dtype)), form)
        stored |= {f"{name}{suffix}": part for suffix, part in parts.items()}
    return stored, dequantized


def stored_integers(weight: QuantizedWeight, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Integers [rows, columns] as they are stored, by what follows "weight" in the names, and in float."""
    values, zeros, group = weight.values, weight.zero_points, weight.values.shape[1] // weight.scales.shape[1]
    centred = values.float() - (0.0 if zeros is None else zeros.float().repeat_interleave(group, 1))
    dequantized = centred * weight.scales.float().repeat_interleave(group, 1)
    if form == "int-quantized":
        return {"": values, "_scale": weight.scales}, dequantized
    bits = 8 if weight.element == "int8" else 4
    parts = {"_packed": packed_words(values, bits), "_scale": weight.scales, "_shape": torch.tensor(values.shape)}
    if zeros is not None:  # packed along the rows
        parts["_zero_point"] = packed_words(zeros.T, bits).T.contiguous()
    return parts, dequantized


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def stored_fp4(weight: QuantizedWeight) -> tuple[dict[str, Tensor], Tensor]:
    """Codes [rows, columns] as they are stored, by what follows "weight" in the names, and in float."""
    codes = weight.values.to(torch.int64)
    parts = {"_packed": (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), "_scale": weight.scales}
    values = _FP4[codes % 8] * (1 - 2 * (codes // 8))
    if weight.factors is None:
        scales = 2.0 ** (weight.scales.double() - 127).float()
        return parts, values * scales.repeat_interleave(32, 1)
    divisor = 1.0 / weight.factors[:1]
    scales = weight.scales.float().repeat_interleave(16, 1)
    return parts | {"_global_scale": divisor}, values * scales / divisor


def quantization_section(scheme: str, form: str, ignore: list[str]) -> dict[str, Any]:
    """A ``quantization_config`` as llm-compressor writes it."""
    parsed = Scheme.parse(scheme)
    tensor = {"actorder": None, "block_structure": None, "observer_kwargs": {}, "symmetric": True, "type": "int"}
    strategy = "channel" if parsed.group_size is None else "tensor_group" if parsed.group_size == 16 else "group"
    weights = {
        "dynamic": False,
        "num_bits": parsed.weights.bits,
        "group_size": parsed.group_size,
        "strategy": strategy,
        "observer": "memoryless_minmax",
        "symmetric": "asym" not in scheme,
        "type": "float" if "fp4" in scheme else "int",
    }
    inputs = {"dynamic": True, "num_bits": 8, "group_size": None, "strategy": "token", "observer": None}
    return {
        "config_groups": {
            "group_0": {
                "format": form,
                "input_activations": tensor | inputs if scheme.startswith(("w4a8", "w8a8")) else None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": tensor | weights,
            }
        },
        "format": form,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }


def write_tensors(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """One file, or several with an index."""
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        old.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]  # experts of one layer end up in different files
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_quantized(
    source: Path,
    folder: Path,
    scheme: str,
    form: str,
    *,
    spelling: str | None = None,
    shards: int = 1,
    scale_dtype: torch.dtype | None = torch.bfloat16,
) -> Path:
    """Writes the float checkpoint ``source`` quantised; attention and dense layers are quantised too.

    ``FOLDER-float`` gets its twin: a float checkpoint with the dequantised weights.
    """
    config = json.loads((source / "config.json").read_text())
    model_type = config["model_type"]
    stored, dequantized = quantized_tensors(
        apart(load_file(source / "model.safetensors"), model_type), scheme, form, scale_dtype
    )
    twin = folder.with_name(f"{folder.name}-float")
    for target, tensors in ((folder, stored), (twin, together(dequantized, model_type))):
        shutil.copytree(source, target)
        if target == folder and spelling is not None:
            tensors = respelled(tensors, spelling)
        write_tensors(target, tensors, shards if target == folder else 1)
    names = (name.rpartition(".")[0] for name in (respelled(stored, spelling) if spelling else stored))
    ignore = [*sorted({name for name in names if _ROUTERS.search(name)}), "lm_head"]
    config["quantization_config"] = quantization_section(scheme, form, ignore)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
