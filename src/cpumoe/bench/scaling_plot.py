"""Plots of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cpumoe.simulation.scaling import Outcome

_NAMES = {"tp": "TP", "ep": "EP", "ep-balanced": "EP with balance"}
_MARKERS = {"tp": "s", "ep": "o", "ep-balanced": "^"}


def plot_scaling(panels: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Tokens per second over ranks, a panel for each title; a line ends where the layout does."""
    from matplotlib.figure import Figure  # pyplot would change the caller's choice of backend

    figure = Figure(figsize=(5 * len(panels), 4), dpi=80, layout="constrained")
    for axes, (title, outcomes) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in dict.fromkeys(outcome.layout for outcome in outcomes):
            line = [
                (outcome.ranks, outcome.prediction.tokens_per_second)
                for outcome in outcomes
                if outcome.layout == name and outcome.prediction is not None
            ]
            if line:
                axes.plot(*zip(*line, strict=True), marker=_MARKERS.get(name, "."), label=_NAMES.get(name, name))
        ranks = sorted({outcome.ranks for outcome in outcomes})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set(xlabel="ranks", ylabel="tokens per second (predicted)")
        axes.set_title(title, fontsize=9)
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
    figure.savefig(path)
