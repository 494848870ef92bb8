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
    """What was measured on the held-out text: bits per byte by scheme, and the expert load."""
    measured: dict[str, Any] = json.loads((FOLDER / "measured.json").read_text())
    return measured


def measured_load(experts: int) -> Tensor:
    """Relative load of each of ``experts`` experts, distributed as this model's are on held-out text: fp32 [experts].

    The loads of a layer, sorted, are a curve; the mean curve of all layers is read at as many points as there are
    experts. Hot and idle experts are spread over the numbers.
    """
    layers = [sorted(counts, reverse=True) for counts in quality()["expert_load"].values()]
    curve = torch.tensor(layers, dtype=torch.float32)
    curve = (curve / curve.sum(1, keepdim=True)).mean(0)  # [experts of the model]
    at = torch.linspace(0, len(curve) - 1, experts)
    low = at.floor().long().clamp(max=len(curve) - 2)
    load = curve[low] + (at - low) * (curve[low + 1] - curve[low])
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return load[order] / load.sum()
