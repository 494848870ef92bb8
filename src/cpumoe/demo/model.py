"""The small real model that comes with the package: a Qwen3-MoE that writes Python, quantised to 4 bits.

Its card is ``models/python-stdlib/README.md``. It is an ordinary checkpoint and is loaded like any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent.parent / "data" / "python-stdlib-w4a8-g128"


def quality() -> dict[str, Any]:
    """Figures measured on the held-out text: bits per byte for each scheme, and the expert load."""
    measured: dict[str, Any] = json.loads((FOLDER / "measured.json").read_text())
    return measured


def measured_load(num_experts: int) -> Tensor:
    """Relative load of each of ``num_experts`` experts, distributed as in this model on held-out text: fp32 [experts].

    The sorted loads of a layer form a curve. The mean curve of all layers is read at ``num_experts`` points, and the
    result is shuffled, so that hot and idle experts are mixed.
    """
    layers = [sorted(counts, reverse=True) for counts in quality()["expert_load"].values()]
    curve = torch.tensor(layers, dtype=torch.float32)
    curve = (curve / curve.sum(1, keepdim=True)).mean(0)  # [experts of the model]
    at = torch.linspace(0, len(curve) - 1, num_experts)
    low = at.floor().long().clamp(max=len(curve) - 2)
    load = curve[low] + (at - low) * (curve[low + 1] - curve[low])
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
    return load[order] / load.sum()
