"""Turns what was measured of whole models into figures for JSON and into a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_limits import StoredBytes, expected_experts, prompt_operations, step_bytes
from model_shape import ModelShape
from model_timing import Measured

from cpumoe.bench.machine_load import doubt


@dataclass(frozen=True)
class ModelFacts:
    """What the limits of a workload follow from; ``stored`` has the bytes of every system, by its name."""

    shape: ModelShape
    stored: dict[str, StoredBytes]
    head_is_packed: bool


def workload_figures(facts: ModelFacts, measured: Measured) -> dict[str, Any]:
    """All figures of one workload: the speed of each system, its limits, and what cpumoe reaches of them."""
    workload = measured.workload
    out: dict[str, Any] = {
        "workload": str(workload),
        "kind": workload.kind,
        "length": workload.length,
        "batch": workload.batch,
        "systems": {name: _speed(workload.tokens, seconds) for name, seconds in measured.seconds.items()},
        "dram_gbps_before": [rate * 1e-9 for rate in measured.before.bytes_per_second],
        "dram_gbps_after": [rate * 1e-9 for rate in measured.after.bytes_per_second],
        "dram_gbps": measured.dram * 1e-9,
        "int8_peak_tops": measured.int8_peak * 1e-12,
        "float_peak_tops": measured.float_peak * 1e-12,
        "taken_by_others": statistics.fmean(measured.taken_by_others) if measured.taken_by_others else None,
    }
    limits = _prefill_limits if workload.kind == "prefill" else _decode_limits
    return out | limits(facts, measured)


def _speed(tokens: int, seconds: list[float]) -> dict[str, Any]:
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "best_tokens_per_second": tokens / min(seconds),
        "ms_median": statistics.median(seconds) * 1e3,
        "ms_min": min(seconds) * 1e3,
        "ms_all": [value * 1e3 for value in seconds],
    }


def _prefill_limits(facts: ModelFacts, measured: Measured) -> dict[str, Any]:
    operations = prompt_operations(facts.shape, measured.workload.length, head_is_packed=facts.head_is_packed)
    seconds = statistics.median(measured.seconds["cpumoe"])
    int8_seconds = operations.int8 / measured.int8_peak
    return {
        "int8_tera_operations": operations.int8 * 1e-12,
        "attention_tera_operations": operations.attention * 1e-12,
        "share_of_int8_peak": int8_seconds / seconds,
        # Attention multiplies floats, at best at the peak of their dot products.
        "share_of_int8_and_float_peak": (int8_seconds + operations.attention / measured.float_peak) / seconds,
        "limit": "int8 peak",
        "share_of_limit": int8_seconds / seconds,
    }


def _decode_limits(facts: ModelFacts, measured: Measured) -> dict[str, Any]:
    shape, batch = facts.shape, measured.workload.batch
    expected = expected_experts(shape, batch)
    # Where the choice cannot be watched, uniform routing is assumed.
    experts = expected if measured.experts is None else measured.experts
    out: dict[str, Any] = {"experts_expected": expected, "experts_counted": measured.experts, "bytes": {}}
    out["share_of_dram"] = {}
    for name, seconds in measured.seconds.items():
        # The choice of experts was watched in cpumoe; other systems have other random weights, but as many experts.
        read = step_bytes(shape, facts.stored[name], batch, measured.mean_depth, experts)
        out["bytes"][name] = read.as_json()
        out["share_of_dram"][name] = read.total / measured.dram / statistics.median(seconds)
    out |= {"limit": "DRAM", "share_of_limit": out["share_of_dram"]["cpumoe"]}
    if measured.layer_alone:
        layer = statistics.median(measured.layer_alone)
        read = step_bytes(shape, facts.stored["cpumoe"], batch, measured.mean_depth, experts)
        limit = shape.layers * layer + read.beside_experts / measured.dram
        out |= {
            "layer_alone_ms": layer * 1e3,
            "layers_and_dram_ms": limit * 1e3,
            "limit": "layers alone, rest at DRAM",
            "share_of_limit": limit / statistics.median(measured.seconds["cpumoe"]),
        }
    return out


def markdown_table(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """A line per workload: tokens per second, medians, and for each peer how many times as fast cpumoe is."""
    titles = ["", "cpumoe, tokens/s", "share of limit"]
    for peer in peers:
        titles += [f"{peer}, tokens/s", "ratio"]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        own = row["systems"]["cpumoe"]["tokens_per_second"]
        line = [row["workload"], f"{own:.1f}", f"{row['share_of_limit']:.0%} ({row['limit']})".replace("%", " %")]
        for peer in peers:
            theirs = row["systems"][peer]["tokens_per_second"]
            line += [f"{theirs:.1f}", f"{own / theirs:.2f}"]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def doubts(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each workload during which the machine was too busy, or whose times scatter too much."""
    lines = []
    for row in rows:
        times = [speed["ms_all"] for speed in row["systems"].values()]
        if min(map(len, times)) > 1 and (reason := doubt(row["taken_by_others"], *times)) is not None:
            lines.append(f"{row['workload']}: {reason}")
    return "\n".join(lines)


def byte_lines(rows: Sequence[dict[str, Any]]) -> str:
    """What each workload reads or computes, a line each."""
    return "\n".join(_byte_line(row) for row in rows)


def _byte_line(row: dict[str, Any]) -> str:
    if row["kind"] == "prefill":
        return (
            f"{row['workload']}: {row['int8_tera_operations']:.2f} T int8 operations, {row['share_of_int8_peak']:.0%} "
            f"of the peak of {row['int8_peak_tops']:.2f} T/s; attention {row['attention_tera_operations']:.2f} T, with "
            f"it at the float peak of {row['float_peak_tops']:.2f} T/s {row['share_of_int8_and_float_peak']:.0%}"
        )
    counted = row["experts_counted"]
    parts = ", ".join(f"{name.replace('_', ' ')} {size * 1e-6:.1f}" for name, size in row["bytes"]["cpumoe"].items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["share_of_dram"].items())
    experts = f"{row['experts_expected']:.1f} expected by uniform routing, " + (
        "not counted" if counted is None else f"{counted:.1f} counted"
    )
    line = (
        f"{row['workload']}: MB a step: {parts}; experts of a layer: {experts}; of DRAM "
        f"({row['dram_gbps']:.1f} GB/s; before {max(row['dram_gbps_before']):.1f}, after "
        f"{max(row['dram_gbps_after']):.1f}): {shares}"
    )
    if "layer_alone_ms" in row:
        line += (
            f"; a layer's experts alone {row['layer_alone_ms']:.2f} ms, all and the rest at DRAM "
            f"{row['layers_and_dram_ms']:.1f} ms of {row['systems']['cpumoe']['ms_median']:.1f}"
        )
    return line
