"""Makes a transformers checkpoint of a training run.

    python export.py --run build/model-run --data build/model-data --out build/model-export --check
    python export.py --weights build/model-out --data build/model-data --out build/model-export --check

``--run`` reads the best weights of a run in fp32, ``--weights`` the bf16 files that training left in its out folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from model import Model, Shape, from_transformers, to_transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST_FILE = 16 * 2**20
INDEX = "model.safetensors.index.json"
_CONFIG_NAMES = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "context": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
}


def write_weights(
    folder: Path, shape: Shape, state: dict[str, Tensor], data: Path, largest_file: int | None = LARGEST_FILE
) -> None:
    """Writes bf16 weights and config.json; ``state`` is that of :class:`Model`. None as ``largest_file``: one file."""
    tensors = {name: tensor.bfloat16() for name, tensor in to_transformers(shape, state).items()}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        entry = tensor.nbytes + len(name) + 100  # with its line in the header
        if largest_file is not None and shards[-1] and size + entry > largest_file - 4096:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += entry
    count = len(shards)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / f"{file}.partial", metadata={"format": "pt"})
    for file in names:  # only now, so that a run killed while it writes leaves the old weights
        (folder / f"{file}.partial").chmod(0o644)  # safetensors writes files that only their owner can read
        (folder / f"{file}.partial").replace(folder / file)
    for old in folder.glob("model*.safetensors"):
        if old.name not in names:
            old.unlink()
    if count == 1:
        (folder / INDEX).unlink(missing_ok=True)
    else:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", shape.transformers_config(**_special_tokens(data)))


def read_weights(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the state, for :class:`Model`, of a folder that :func:`write_weights` wrote."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{item.name: config[_CONFIG_NAMES[item.name]] for item in fields(Shape)})
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return shape, from_transformers(shape, tensors)


def read_run(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the best weights of a training run."""
    settings = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)["progress"]["settings"]
    state = torch.load(folder / "best.pt", map_location="cpu", weights_only=True)
    return Shape(**{item.name: settings[item.name] for item in fields(Shape)}), state


def check(folder: Path, shape: Shape, state: dict[str, Tensor], data: Path) -> None:
    """Compares the logits of the exported model in transformers with ours, both in fp32, on held-out text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (data / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text[:4000])["input_ids"][: min(512, shape.context)]])
    expected_ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text[:4000]))])
    if ids[0, 0] != tokenizer.bos_token_id or not torch.equal(ids[:, 1:], expected_ids[:, : ids.shape[1] - 1]):
        raise SystemExit("the tokenizer does not put <|begin|> before the text")

    ours = Model(shape).eval()
    ours.load_state_dict({name: tensor.bfloat16().float() for name, tensor in state.items()})  # rounded as on disk
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if sum(parameter.numel() for parameter in theirs.parameters()) != shape.parameters():
        raise SystemExit("transformers counts another number of parameters")
    with torch.no_grad():
        difference = (ours.logits(ours(ids)[0]) - theirs(ids).logits).abs().max().item()
    print(f"largest difference of a logit to transformers: {difference:.2e}")
    if difference > 1e-4:
        raise SystemExit("the export is wrong: the difference must be at most 1e-4")


def _special_tokens(data: Path) -> dict[str, int]:
    added = json.loads((data / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return {token["content"].strip("<|>"): token["id"] for token in added}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="run folder of train.py")
    source.add_argument("--weights", type=Path, help="out folder of train.py")
    parser.add_argument("--data", type=Path, default=Path("build/model-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest-file-mib", type=int, help="cut the weights into files of at most this size")
    parser.add_argument("--check", action="store_true", help="compare logits with transformers")
    args = parser.parse_args()

    shape, state = read_run(args.run) if args.run else read_weights(args.weights)
    largest = None if args.largest_file_mib is None else args.largest_file_mib * 2**20
    write_weights(args.out, shape, state, args.data, largest)
    special = _special_tokens(args.data)
    generation = {
        "bos_token_id": special["begin"],
        "eos_token_id": special["end"],
        "pad_token_id": special["pad"],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }
    _write_json(args.out / "generation_config.json", generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / name, args.out / name)
    files = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{shape.parameters():,} parameters, {shape.parameters(active=True):,} per token, {files:,} bytes")
    if args.check:
        check(args.out, shape, state, args.data)


if __name__ == "__main__":
    main()
