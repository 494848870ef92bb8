"""How many tokens a second a model would compute on ranks that are not there.

A layer ends when its slowest rank ends: what that computes follows from the tokens that each of its experts gets, by
measured costs of the kernels; what it exchanges, from the bytes of the exchange that the layout has. Nothing overlaps,
as nothing does in the code. Attention over tokens in the cache is not counted, as it depends on texts and not on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpumoe.layers.parallel_layout import Exchange, ExpertsPart, ParallelLayout
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.balance import plan_placement
from cpumoe.parallel.placement import Placement, physical_ids
from cpumoe.simulation.exchange_costs import ExchangeCosts, Network
from cpumoe.simulation.kernel_costs import Floats, KernelCosts
from cpumoe.simulation.model_shapes import ModelShape
from cpumoe.simulation.routing_trace import RoutingTrace


@dataclass(frozen=True)
class LayerPrediction:
    """One layer's experts, on average.

    Attributes:
        experts: seconds of the slowest rank.
        exchange: seconds.
        imbalance: the slowest rank over the mean.
    """

    experts: float
    exchange: float
    imbalance: float

    @property
    def seconds(self) -> float:
        return self.experts + self.exchange


@dataclass(frozen=True)
class Prediction:
    """A step of a whole model.

    Attributes:
        ranks: how many there are.
        tokens: of a step, on all ranks together.
        experts, exchange, rest: seconds of a step by part: experts of the slowest ranks, all exchanges, all else.
        imbalance: the slowest rank's experts over the mean, on average.
        rank_bytes: weights that the largest rank holds.
    """

    ranks: int
    tokens: int
    experts: float
    exchange: float
    rest: float
    imbalance: float
    rank_bytes: float

    @property
    def seconds(self) -> float:
        return self.experts + self.exchange + self.rest

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "tokens_per_second": self.tokens_per_second}


def simulate(
    model: ModelShape,
    layout: ParallelLayout,
    costs: KernelCosts,
    network: Network,
    trace: RoutingTrace,
    tokens: int,
    placements: Sequence[Placement] | None = None,
) -> Prediction:
    """Predicts steps of so many tokens, of all ranks together.

    Raises ValueError for what a layout, a scheme or the measured costs cannot do, with the numbers.

    Args:
        model: what is computed.
        layout: as any rank has it.
        costs: measured on a layer of these sizes.
        network: of the ranks.
        trace: of layers like those of the model; each stands for as many.
        tokens: of a step.
        placements: of the experts, for each layer of the trace; None has consecutive ones on every rank.
    """
    layer = simulate_layer(model, layout, costs, network, trace, tokens, placements)
    exchange = ExchangeCosts.of(network, costs, layout.flat_size, model.topk)
    # In a tensor parallel group linears are split and all have the same tokens; otherwise ranks have all weights, and
    # tokens of their own.
    split = layout.tp_size
    of_rank = -(-tokens * split // layout.flat_size)
    rest = costs.linears_seconds(model.other_weights / split, of_rank) * network.waiting(layout.flat_size)
    # Attention gathers what its heads gave, and the outputs of its last linear.
    gathered = 2 * model.layers * exchange.gather_hidden(tokens) if split > 1 else 0.0
    placed = _placements(model, layout, trace, placements)
    share = 1 / layout.flat_size if placed is None else max(map(len, placed[0].by_rank)) / model.experts
    experts_bytes = costs.expert_bytes * model.experts * model.expert_layers * share
    weight_bytes = Scheme.parse(costs.scheme).weights.bits / 8
    return Prediction(
        layout.flat_size,
        tokens,
        layer.experts * model.expert_layers,
        layer.exchange * model.expert_layers + gathered,
        rest,
        layer.imbalance,
        experts_bytes + model.other_weights / split * weight_bytes,
    )


def simulate_layer(
    model: ModelShape,
    layout: ParallelLayout,
    costs: KernelCosts,
    network: Network,
    trace: RoutingTrace,
    tokens: int,
    placements: Sequence[Placement] | None = None,
) -> LayerPrediction:
    """Predicts one layer's experts alone; see :func:`simulate`."""
    _check(model, layout, costs, trace, tokens)
    placed = _placements(model, layout, trace, placements)
    layers = []
    for number, ids in trace.steps(tokens):
        if placed is None:
            layers.append(_sliced(model, layout, costs, network, ids))
        else:
            layers.append(_spread(model, layout, costs, network, ids, placed[number]))
    parts = zip(*((layer.experts, layer.exchange, layer.imbalance) for layer in layers), strict=True)
    return LayerPrediction(*(float(np.mean(part)) for part in parts))


def balanced_placements(
    model: ModelShape, layout: ParallelLayout, trace: RoutingTrace, nodes: int = 1, spare: int = 1
) -> tuple[Placement, ...]:
    """Placements planned from a trace, for each of its layers; ``spare``: slots a rank beyond those that are needed."""
    ranks = layout.flat_size
    slots = min(-(-model.experts // ranks) + spare, model.experts)
    groups = model.groups if model.groups > 1 else None
    return tuple(
        plan_placement(trace.loads(layer), ranks, slots, nodes if ranks % nodes == 0 else 1, groups)
        for layer in range(len(trace.layers))
    )


def _check(model: ModelShape, layout: ParallelLayout, costs: KernelCosts, trace: RoutingTrace, tokens: int) -> None:
    if (costs.hidden, costs.intermediate) != (model.hidden, model.intermediate):
        raise ValueError(
            f"the costs were measured for a hidden size of {costs.hidden} and an intermediate size of "
            f"{costs.intermediate}; {model.name} has {model.hidden} and {model.intermediate}"
        )
    if (trace.experts, trace.topk) != (model.experts, model.topk):
        raise ValueError(
            f"the trace has {trace.topk} of {trace.experts} experts a token; {model.name} has {model.topk} of "
            f"{model.experts}"
        )
    if layout.tp_size not in (1, layout.flat_size) or layout.sequence_parallel:
        raise ValueError(f"the layout {layout} has tensor parallel groups beside others; one kind of them is accepted")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; 1 or more is accepted")
    _largest_slice(model, layout, costs)


def _largest_slice(model: ModelShape, layout: ParallelLayout, costs: KernelCosts) -> int:
    """Return the neurons of the largest slice of an expert. Raise ValueError if there cannot be as many slices."""
    _, neurons = ExpertsPart((0,), layout.experts_tp_size).cut(
        model.intermediate, Scheme.parse(costs.scheme).slice_unit
    )
    return neurons


def _placements(
    model: ModelShape, layout: ParallelLayout, trace: RoutingTrace, given: Sequence[Placement] | None
) -> Sequence[Placement] | None:
    """Of each layer of the trace; None where every rank has a slice of all experts."""
    if not layout.uses_ep:
        if given is not None:
            raise ValueError(f"a placement of experts with the layout {layout}, which splits every one of them")
        return None
    if given is None:
        return [Placement.of_layout(model.experts, layout)] * len(trace.layers)
    if len(given) != len(trace.layers):
        raise ValueError(f"{len(given)} placements for the {len(trace.layers)} layers of the trace")
    for placement in given:
        if (placement.expert_count, placement.rank_count) != (model.experts, layout.flat_size):
            raise ValueError(f"a placement of {placement}, where {layout.flat_size} ranks have {model.experts} experts")
    return given


def _sliced(
    model: ModelShape, layout: ParallelLayout, costs: KernelCosts, network: Network, ids: Tensor
) -> LayerPrediction:
    """Every rank has a slice of every expert: all compute the same rows, each its share of them."""
    tokens, n = len(ids), layout.flat_size
    rows = torch.bincount(ids.flatten().long(), minlength=model.experts).numpy().astype(np.float64)
    experts = costs.layer_seconds(tokens, rows, _largest_slice(model, layout, costs)) * network.waiting(n)
    exchange = ExchangeCosts.of(network, costs, n, model.topk)
    moved = exchange.share_ranges(tokens)
    if layout.chosen_exchange is Exchange.ALLGATHER_REDUCESCATTER:
        moved += exchange.to_all_ranks(_own_tokens(tokens, n))
    else:
        moved += exchange.all_reduce(tokens)
    return LayerPrediction(experts, moved, 1.0)


def _spread(
    model: ModelShape,
    layout: ParallelLayout,
    costs: KernelCosts,
    network: Network,
    ids: Tensor,
    placement: Placement,
) -> LayerPrediction:
    """Whole experts: a rank computes what tokens want of its own."""
    tokens, n = len(ids), layout.flat_size
    slots = physical_ids(ids.long(), placement)  # [tokens, K]
    rank_of = torch.tensor(placement.rank_of)
    rows = torch.bincount(slots.flatten(), minlength=len(rank_of)).numpy().astype(np.float64)
    seconds = np.bincount(rank_of.numpy(), costs.expert_seconds(rows), minlength=n).astype(np.float64)
    exchange = ExchangeCosts.of(network, costs, n, model.topk)
    calls = np.full(n, float(tokens))
    if layout.chosen_exchange is Exchange.ALL_TO_ALL:
        visits = _visits(rank_of[slots], n)
        moved, calls = exchange.to_owners(visits), visits.sum(0)
    elif layout.chosen_exchange is Exchange.ALLGATHER_REDUCESCATTER:
        moved = exchange.to_all_ranks(_own_tokens(tokens, n))
    else:
        moved = exchange.all_reduce(tokens)
    seconds = seconds + calls * costs.token_seconds + costs.call_seconds
    return LayerPrediction(_until_all_end(seconds, network), moved, float(seconds.max() / seconds.mean()))


def _until_all_end(seconds: Floats, network: Network) -> float:
    """The slowest rank, or where ranks take turns on the cores of a node, all of its work over them."""
    slowest = float(seconds.max())
    if network.at_once is None:
        return slowest
    of_nodes = np.bincount(network.node_of(len(seconds)), seconds)
    return max(slowest, float(of_nodes.max()) / network.at_once)


def _own_tokens(tokens: int, ranks: int) -> Floats:
    """How many tokens of a step each rank has: consecutive ones, as even as it goes."""
    begins = tokens * np.arange(ranks + 1) // ranks
    return np.diff(begins).astype(np.float64)


def _visits(ranks_of_choices: Tensor, ranks: int) -> Floats:
    """[from, to]: how many tokens of a rank have an expert on another. ``ranks_of_choices``: [tokens, K]."""
    tokens = len(ranks_of_choices)
    wanted = torch.zeros((tokens, ranks), dtype=torch.bool).scatter_(1, ranks_of_choices, True)
    begins = (tokens * np.arange(ranks + 1) // ranks).tolist()
    return np.stack([wanted[low:high].sum(0).numpy() for low, high in pairwise(begins)]).astype(np.float64)
