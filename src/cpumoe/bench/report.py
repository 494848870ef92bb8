"""Shows the rows of a measurement as a table, as JSON and as a roofline plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cpumoe.bench.measure import Row
from cpumoe.tables import aligned

_COLUMNS = (
    ("system", "{0.system}"),
    ("shape", "{0.shape}"),
    ("scheme", "{0.scheme}"),
    ("tokens", "{0.tokens}"),
    ("isa", "{0.isa}"),
    ("thr", "{0.threads}"),
    ("ms", "{0.ms_median:.3f}"),
    ("min ms", "{0.ms_min:.3f}"),
    ("TOPS", "{0.tops:.3f}"),
    ("of peak", "{0.compute_fraction:.0%}"),
    ("GB/s", "{0.weight_gbps:.1f}"),
    ("of DRAM", "{0.dram_fraction:.0%}"),
)


_NUMBERS = {3, *range(5, 12)}  # columns


def table(rows: Sequence[Row]) -> str:
    titles = [title for title, _ in _COLUMNS]
    cells = ([template.format(row) for _, template in _COLUMNS] for row in rows)
    return "\n".join(aligned([titles, *cells], right=_NUMBERS))


def write_json(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws a roofline: operations per second over operations per byte of weights, with both limits of the machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    own = [row for row in rows if row.system == "cpumoe"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for i, isa in enumerate(dict.fromkeys(row.isa for row in own)):
        chosen = [row for row in own if row.isa == isa]
        dram = max(row.dram_gbps for row in chosen) * 1e-3  # TB/s
        peak = max(row.peak_tops for row in chosen)
        intensities = [row.tops / (row.weight_gbps * 1e-3) for row in chosen]
        left, right = min(intensities) / 2, max(max(intensities) * 2, 2 * peak / dram)
        knee = peak / dram
        axes.plot([left, knee, right], [left * dram, peak, peak], color=colours[i], label=f"limit, {isa}")
    markers = "osD^vP*X"
    for i, (shape, scheme, isa) in enumerate(dict.fromkeys((r.shape, r.scheme, r.isa) for r in own)):
        chosen = [r for r in own if (r.shape, r.scheme, r.isa) == (shape, scheme, isa)]
        x = [r.tops / (r.weight_gbps * 1e-3) for r in chosen]
        axes.plot(
            x,
            [r.tops for r in chosen],
            linestyle=":",
            marker=markers[i % len(markers)],
            label=f"{shape} {scheme}, {isa}",
        )
        for r, at in zip(chosen, x, strict=True):
            axes.annotate(f"T={r.tokens}", (at, r.tops), textcoords="offset points", xytext=(5, -10), fontsize=7)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte of weights read",
        ylabel="TOPS (int8)",
        title=f"cpumoe, {own[0].threads} threads" if own else "cpumoe",
    )
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
