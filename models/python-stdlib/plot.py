"""Draws the curves and the expert load of a training log.

    python plot.py build/model-out/log.jsonl models/python-stdlib/curves.png

Training does this itself where matplotlib is installed.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def plot(log: Path, picture: Path) -> None:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [entry for entry in entries if entry["event"] == "train"]
    evaluations = [entry for entry in entries if entry["event"] == "eval"]
    best = next((entry for entry in entries if entry["event"] == "best"), None)

    figure, (curve, balance, heat) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    epochs = [entry["epoch"] for entry in evaluations]
    curve.plot(epochs, [entry["train_bits_per_byte"] for entry in evaluations], label="trained on")
    curve.plot(epochs, [entry["valid_bits_per_byte"] for entry in evaluations], label="validation")
    if best is not None:
        held_out = best["heldout_bits_per_byte"]
        curve.axhline(held_out, color="grey", linestyle=":", label=f"held-out, best weights: {held_out:.3f}")
    curve.set(xlabel="epochs", ylabel="bits per byte", title="How well it predicts")
    curve.legend()

    epochs = [entry["epoch"] for entry in steps]
    balance.plot(epochs, [entry["largest_load"] for entry in steps], label="busiest expert")
    balance.plot(epochs, [entry["smallest_load"] for entry in steps], label="idlest expert")
    balance.set(xlabel="epochs", ylabel="load / equal share", title="Expert load in training, all layers")
    balance.legend()

    loads = (best or evaluations[-1])["loads"]
    shares = [[load * len(layer) for load in layer] for layer in loads]
    top = max(2.0, math.ceil(max(map(max, shares))))
    image = heat.imshow(shares, aspect="auto", vmin=0, vmax=top, cmap="viridis")
    heat.set_yticks(range(len(shares)))
    heat.set(xlabel="expert", ylabel="layer", title="Load / equal share, " + ("held-out" if best else "validation"))
    figure.colorbar(image, ax=heat)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
