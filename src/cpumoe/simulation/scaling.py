"""Predictions for growing numbers of ranks, in the layouts between which one chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpumoe.layers.parallel_layout import Exchange, ParallelLayout
from cpumoe.simulation.exchange_costs import Network
from cpumoe.simulation.kernel_costs import KernelCosts
from cpumoe.simulation.model_shapes import ModelShape
from cpumoe.simulation.routing_trace import RoutingTrace
from cpumoe.simulation.simulation import Prediction, balanced_placements, simulate


@dataclass(frozen=True)
class Outcome:
    """A layout on some ranks: what is predicted, or why it cannot be."""

    layout: str
    ranks: int
    prediction: Prediction | None
    refusal: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = {} if self.prediction is None else self.prediction.to_json()
        return {"layout": self.layout, "ranks": self.ranks, "refusal": self.refusal, **found}


def scaling(
    model: ModelShape,
    layouts: Sequence[str],
    ranks: Sequence[int],
    costs: KernelCosts,
    network: Network,
    trace: RoutingTrace,
    tokens: int,
    exchange: Exchange = Exchange.ALL_TO_ALL,
    spare: int = 1,
) -> list[Outcome]:
    """All layouts on all numbers of ranks; see :func:`cpumoe.simulation.simulation.simulate`.

    A placement is planned from the first half of the trace, and everything is predicted for the second.

    Args:
        exchange: of layouts with whole experts on ranks.
        spare: slots a rank for copies, where they are balanced.
    """
    planned, judged = trace.halves()
    outcomes = []
    for name in layouts:
        for count in ranks:
            layout = _layout(name, count, exchange)
            try:
                placements = None
                if name == "ep-balanced" and count > 1:
                    placements = balanced_placements(model, layout, planned, network.nodes(count), spare)
                found = simulate(model, layout, costs, network, judged, tokens, placements)
            except ValueError as problem:
                outcomes.append(Outcome(name, count, None, str(problem)))
            else:
                outcomes.append(Outcome(name, count, found))
    if all(outcome.prediction is None for outcome in outcomes):
        raise ValueError(outcomes[0].refusal)
    return outcomes


def _layout(name: str, ranks: int, exchange: Exchange) -> ParallelLayout:
    if name == "tp" or ranks == 1:
        return ParallelLayout(tp_size=ranks)
    return ParallelLayout(dp_size=ranks, expert_parallel=True, exchange=exchange)
