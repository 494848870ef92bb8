"""Quantises the model in every scheme, rounded to nearest and calibrated, and measures each on the held-out text.

    git archive af38e21 models/python-stdlib/checkpoint | tar x  # the float model: 42 MB, in the history alone
    python models/python-stdlib/measure.py --data build/model-data --out build/model-quantized

Writes ``measured.json`` (bits per byte by scheme, the expert load of the shipped scheme), the heat map of that load,
and prints the table of the model card. The calibration text is a part of the training data, or the one that is named;
without either nothing is calibrated, and schemes that store the scales of their activations are left out. Weight-only
schemes are also run with int8 activations, if they can be.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

import cpumoe
from cpumoe.evaluation.expert_load import count_expert_load
from cpumoe.evaluation.perplexity import perplexity
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.quantization.gptq import takes_statistics

HERE = Path(__file__).parent
SCHEMES = ("w4a8", "w4a8-g128", "w4a8-g32", "w8a8", "w4a16", "w4a16-g128", "w4a16-g32", "w4a16-g128-asym")
SCHEMES += ("w4a16-g32-asym", "w8a16", "w8a16-g32", "w8a16-g32-asym", "mxfp4a16", "nvfp4a16", "fp8", "fp8-tensor")
SCHEMES += (
    "fp8-tensor-dynamic",
    "fp8-block",
    "fp8a16",
    "nvfp4",
    "mxfp4",
    "mxfp4a8",
    "mxfp4afp8",
    "mxfp6-e2m3",
    "mxfp8",
)
SCHEMES += ("mxfp6-e2m3a16", "mxfp8a16", "w4afp8", "w4afp8-g128", "w8a8-static")
SHIPPED = "w4a8-g128 calibrated"
_PIECES, _PIECE_TOKENS = 64, 4096  # of the training data, evenly spread


def calibration_text(data: Path, tokenizer: object, path: Path) -> Path:
    """Pieces of the training data as JSON lines."""
    tokens = np.fromfile(data / "train.bin", dtype=np.uint16)
    starts = np.linspace(0, len(tokens) - _PIECE_TOKENS, _PIECES).astype(int)
    with path.open("w") as out:
        for start in starts:
            text = tokenizer.decode(tokens[start : start + _PIECE_TOKENS].tolist(), skip_special_tokens=True)
            out.write(json.dumps({"text": text}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint", help="the float model")
    parser.add_argument("--data", type=Path, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the quantised models; made anew")
    parser.add_argument("--calibration", type=Path, help="a calibration text, instead of a part of --data")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="names with commas in between (all)")
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences of 1024 tokens (64)")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    text = (HERE.parents[1] / "tests" / "data" / "heldout.txt").read_text()
    ways: dict[str, dict[str, object]] = {"round to nearest": {}}
    calibration = arguments.calibration
    if calibration is None and arguments.data is not None:
        calibration = calibration_text(arguments.data, tokenizer, arguments.out / "calibration.jsonl")
    if calibration is not None:
        options = {"calibration": calibration, "calibration_samples": arguments.samples, "calibration_length": 1024}
        ways["calibrated"] = options

    def measure(name: str, folder: Path, **options: str) -> None:
        # fp32 for what is not quantised: the figures are about the weights.
        model = cpumoe.load_model(folder, dtype=torch.float32, **options)
        with count_expert_load(model) as load:
            bits[name] = perplexity(model, tokenizer, text).bits_per_byte
        loss = bits[name] / bits["float"] - 1
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) * 1e-6
        print(f"| {name} | {bits[name]:.4f} | {loss:+.2%} | {size:.1f} MB |", flush=True)
        if name == SHIPPED:
            loads.update({layer: counts.tolist() for layer, counts in load.counts.items()})
            load.heatmap(arguments.out / "expert-load.png")

    bits: dict[str, float] = {}
    loads: dict[str, list[int]] = {}
    print("| weights | bits per byte | against float | on disk |\n|---|---:|---:|---:|")
    measure("float", arguments.checkpoint, scheme="float")
    for scheme in map(cpumoe.Scheme.parse, arguments.schemes.split(",")):
        for way, options in ways.items():
            calibrates = takes_statistics(scheme) or needs_input_scales(scheme)
            if (options and not calibrates) or (not options and needs_input_scales(scheme)):
                continue
            folder = arguments.out / f"{scheme}-{way.replace(' ', '-')}"
            cpumoe.quantize_checkpoint(arguments.checkpoint, folder, scheme, **options)
            measure(f"{scheme} {way}", folder)
            if scheme.activations is None and scheme.takes_int8_activations:
                measure(f"{scheme}+int8 {way}", folder, activations="int8")
    measured = {"bits_per_byte": bits, "expert_load": loads}
    (arguments.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
