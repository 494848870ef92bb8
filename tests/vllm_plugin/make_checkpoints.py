"""Writes the checkpoints that vLLM is tried with, and what cpumoe's own path makes of them.

    python tests/vllm_plugin/make_checkpoints.py FOLDER

runs with cpumoe's own environment: vLLM's has another version of transformers. ``FOLDER/cases.json`` has for each
checkpoint prompts, the tokens that follow greedily in fp32, and by how much the first beat the second.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from float_checkpoints import write_checkpoint
from rank_checkpoints import FORMS, ORDERED
from safetensors.torch import load_file, save_file
from tiny_architectures import write_float, write_quantized
from torch import Tensor

import cpumoe
from cpumoe.checkpoints.formats.mxfp4 import Mxfp4Storage
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

SHIPPED = Path(cpumoe.__file__).parent / "data" / "python-stdlib-w4a8-g128"
PROMPTS, NEW = (5, 12, 33), 12

#: vLLM's attention on CPUs has heads of 32 values at least.
_SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace(", ", " with ")).strip("-")


def _with_ignored(section: dict[str, Any]) -> dict[str, Any]:
    """The routers and the head are left in float, as tools do it, each in its own words."""
    left = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    field = {"compressed-tensors": "ignore", "modelopt": "ignore"}.get(
        section["quant_method"], "modules_to_not_convert"
    )
    return {**section, field: left}


def _every_form(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A model of Qwen3-MoE in all on-disk forms that have a linear for each expert."""
    forms: dict[str, tuple[Any, Any]] = {n: f for n, f in FORMS.items() if f[0] is not None}
    forms |= {f"{name}, ordered": form[:2] for name, form in ORDERED.items()}
    for name, (section, store) in forms.items():
        target = folder / slug(name)
        write_checkpoint(source, target, _with_ignored(section), lambda _, weight, s=store: (s(weight), weight))
        yield name, target


def _gpt_oss(folder: Path) -> Iterator[tuple[str, Path]]:
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # vLLM's gpt-oss has no other positions
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    source = write_float(folder / "gpt-oss", "gpt_oss", **sizes, rope_parameters=yarn, dtype=torch.bfloat16)
    yield "gpt-oss", source
    yield "gpt-oss w4a8-g32", write_quantized(source, folder / "gpt-oss-w4a8", "w4a8-g32", "pack-quantized")
    native = folder / "gpt-oss-mxfp4"
    shutil.copytree(source, native)
    storage, held = Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4"), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            held[name] = tensor
            continue
        encoded = [storage.encode(quantize_weight(one.T.float().contiguous(), storage.scheme)) for one in tensor]
        held |= {f"{name}_{suffix}": torch.stack([e[suffix] for e in encoded]) for suffix in encoded[0]}
    save_file({name: t.contiguous() for name, t in held.items()}, native / "model.safetensors", {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _change_config(native, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})
    yield "gpt-oss mxfp4", native


def _architectures(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models whose routing, shared experts and names differ; the scheme is the same."""
    for name, changes in {
        "mixtral": {"hidden_size": 128, "head_dim": 32},
        "olmoe": {"hidden_size": 128},
        "qwen2_moe": {"hidden_size": 128},
        "glm4_moe": {"hidden_size": 128, "head_dim": 32},
        "llama4_text": {"hidden_size": 128, "head_dim": 32},
    }.items():
        source = write_float(folder / f"{name}-source", name, **changes)
        spelling = "w123" if name == "mixtral" else None
        target = write_quantized(source, folder / name, "w4a8-g32", "int-quantized", spelling=spelling)
        if name == "glm4_moe":
            _change_config(target, topk_method="noaux_tc", scoring_func="sigmoid")
        yield name, target


def _deepseek(folder: Path) -> Path:
    """Latent attention of the size that vLLM has it for, groups and a bias for the choice; and its twin in float."""
    sizes = {"hidden_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    source = write_float(folder / "deepseek-source", "deepseek_v3", **sizes)
    target = write_quantized(source, folder / "deepseek", "w4a16-g32", "pack-quantized")
    for one in (target, target.with_name("deepseek-float")):
        _change_config(one, topk_method="noaux_tc", scoring_func="sigmoid")
    return target


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _answers(folder: Path) -> list[dict[str, Any]]:
    """Prompts, and what cpumoe's own path answers in fp32; margins are in standard deviations of the logits."""
    model = cpumoe.load_model(folder, dtype=torch.float32).eval()
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(7)
    answers = []
    for length in PROMPTS:
        prompt: list[int] = torch.randint(4, vocabulary, (length,), generator=generator).tolist()
        tokens: list[int] = []
        margins: list[float] = []
        for _ in range(NEW):
            with torch.no_grad():
                logits: Tensor = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float((best.values[0] - best.values[1]) / logits.std()))
        answers.append({"prompt": prompt, "tokens": tokens, "margins": margins})
    return answers


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = write_float(folder / "qwen3-float", "qwen3_moe", **_SIZES, dtype=torch.bfloat16)
    cases: dict[str, dict[str, Any]] = {}

    def add(name: str, path: Path) -> None:
        print(name, flush=True)
        cases[name] = {"folder": str(path), "answers": _answers(path)}

    add("shipped", SHIPPED)
    add("float", source)
    makers: list[Callable[[Path], Iterator[tuple[str, Path]]]] = [
        lambda path: _every_form(source, path),
        _gpt_oss,
        _architectures,
    ]
    for make in makers:
        for name, path in make(folder):
            add(name, path)
    _deepseek(folder)
    (folder / "cases.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
