"""What every rank of a layout would hold of a checkpoint, and what it would send for a token.

Headers tell all of that; nothing is loaded. What does not divide is refused as a load would refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import Any

from cpumoe import cpu
from cpumoe.checkpoints.contents import experts_bytes, total
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.loading import experts_config, experts_scheme
from cpumoe.checkpoints.named_tensors import naming
from cpumoe.errors import CheckpointError
from cpumoe.layers.parallel_layout import Exchange, ExpertsPart, ParallelLayout
from cpumoe.layers.scheme import PER_TOKEN_INT8, Scheme
from cpumoe.parallel.linear import is_split

_SUM_BYTES = 4  # sums of experts travel in fp32 and are rounded once
_SCALE_AND_ZERO_POINT = 8  # of a token in int8


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank is expected to send: to ranks of its own node, and to those of others."""

    inside: float = 0.0
    between: float = 0.0

    @property
    def bytes(self) -> float:
        return self.inside + self.between

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __truediv__(self, count: int) -> Traffic:
        return Traffic(self.inside / count, self.between / count)

    def to_json(self) -> dict[str, float]:
        return {"inside_node": self.inside, "between_nodes": self.between}


@dataclass(frozen=True)
class RankPlan:
    """One rank.

    Attributes:
        layout: as this rank has it.
        node: that it is on.
        parts: what it holds of each layer's experts.
        experts_bytes: of its packed experts.
        other_bytes: of everything else; of linears whose outputs are split, those of this rank.
        traffic: what it sends for one token in all layers.
    """

    layout: ParallelLayout
    node: int
    parts: tuple[ExpertsPart, ...]
    experts_bytes: int
    other_bytes: int
    traffic: Traffic

    @property
    def bytes(self) -> int:
        return self.experts_bytes + self.other_bytes

    @property
    def layer_traffic(self) -> Traffic:
        """The same for one layer, on average."""
        return self.traffic / len(self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no expert of any layer."""
        return not any(part.experts for part in self.parts)

    @property
    def held(self) -> str:
        """Its experts in words."""
        return "; ".join(dict.fromkeys(map(str, self.parts)))


@dataclass(frozen=True)
class ModelPlan:
    """All ranks.

    ``schemes``, ``expert_counts`` and ``per_token`` are those of the layers, each once: what experts are held as, how
    many there are, and how many a token goes to.
    """

    layout: ParallelLayout
    nodes: int
    schemes: tuple[Scheme, ...]
    expert_counts: tuple[int, ...]
    per_token: tuple[int, ...]
    ranks: tuple[RankPlan, ...]

    @property
    def layer_count(self) -> int:
        """Layers with experts."""
        return len(self.ranks[0].parts)

    @property
    def exchange(self) -> str | None:
        chosen = self.layout.chosen_exchange
        return None if chosen is None else chosen.value

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "nodes": self.nodes,
            "exchange": self.exchange,
            "experts": {
                "layers": self.layer_count,
                "count": list(self.expert_counts),
                "per_token": list(self.per_token),
                "schemes": list(map(str, self.schemes)),
            },
            "ranks": [
                {
                    "rank": rank.layout.flat_rank,
                    "node": rank.node,
                    "dp_rank": rank.layout.dp_rank,
                    "pcp_rank": rank.layout.pcp_rank,
                    "tp_rank": rank.layout.tp_rank,
                    "held": rank.held,
                    "layers": [
                        {"experts": list(part.experts), "slice": part.slice, "slices": part.slices}
                        for part in rank.parts
                    ],
                    "experts_bytes": rank.experts_bytes,
                    "other_bytes": rank.other_bytes,
                    "bytes": rank.bytes,
                    "sent_per_token_and_layer": rank.layer_traffic.to_json(),
                    "sent_per_token": rank.traffic.to_json(),
                }
                for rank in self.ranks
            ],
        }


def plan_ranks(survey: Survey, layout: ParallelLayout, nodes: int = 1) -> ModelPlan:
    """Plans all ranks of a layout for a checkpoint.

    Raises CheckpointError if the checkpoint would not load or has no experts, and ValueError if its experts, or the
    ranks and nodes, do not divide.

    Args:
        survey: of the checkpoint, with the scheme that float experts are quantised to.
        layout: as any of its ranks has it.
        nodes: ranks lie on so many nodes in order, the same number on each.
    """
    count = layout.flat_size
    if nodes < 1 or count % nodes != 0:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(f"{count} ranks on {nodes} nodes; a number of nodes that divides them is accepted: {fitting}")
    folder = survey.checkpoint.folder
    if survey.problems:
        raise CheckpointError(f"{folder} would not load; cpumoe inspect says why")
    if not survey.sources:
        raise CheckpointError(f"{folder} has no experts to spread; a mixture-of-experts model is accepted")
    sources = list(survey.sources.values())
    stored_once = {source.layout.stored: layer for layer, source in enumerate(sources)}.values()  # some share theirs
    other = total([part.memory_bytes for part in survey.parts if part.kind != "experts"]) or 0
    other -= _elsewhere(survey, layout)
    parts = [tuple(_part(source, rank) for source in sources) for rank in layout.ranks()]
    sent = [
        _sent_by_rank(source, layout, nodes, [len(of_rank[layer].experts) for of_rank in parts])
        for layer, source in enumerate(sources)
    ]
    return ModelPlan(
        layout,
        nodes,
        tuple(dict.fromkeys(source.config.scheme for source in sources)),
        tuple(dict.fromkeys(source.config.experts for source in sources)),
        tuple(dict.fromkeys(source.layout.per_token for source in sources)),
        tuple(
            RankPlan(
                layout.of_rank(rank),
                rank * nodes // count,
                of_rank,
                sum(part_bytes(sources[layer], of_rank[layer]) for layer in stored_once),
                other,
                sum((of_layer[rank] for of_layer in sent), Traffic()),
            )
            for rank, of_rank in enumerate(parts)
        ),
    )


# ---- memory --------------------------------------------------------------------------------------------------------


def _elsewhere(survey: Survey, layout: ParallelLayout) -> int:
    """Bytes of linears that a rank does not hold, because their outputs are split over its tensor parallel group."""
    assert survey.layout is not None
    float_bytes, missing = cpu.float_dtype()[0].itemsize, 0
    for name, place in survey.layout.linears.items():
        quantized = survey.linears.get(name)
        if is_split(place, quantized, None, layout):
            floats = place.rows * place.columns * float_bytes
            parts = (1, layout.tp_size)
            whole, own = (floats // n if quantized is None else quantized.packed_bytes(n) for n in parts)
            # One that is tied has no weight of its own until it is split.
            missing += (0 if place.is_tied and quantized is None else whole) - own
    return missing


def _part(source: ExpertSource, layout: ParallelLayout) -> ExpertsPart:
    with naming(source.prefix):
        return layout.part_of(source.config.experts, source.config.intermediate_size)


def part_bytes(source: ExpertSource, part: ExpertsPart) -> int:
    """Bytes of the packed experts that a rank holds of a layer. Refuses slices that the scheme cannot have."""
    if not part.experts:
        return 0
    config, storage, layout = source.config, source.storage, source.layout
    scheme = config.scheme if storage is None else experts_scheme(storage, part.slices, layout.fused is not None)
    cut = experts_config(layout.shape, scheme, part, source.prefix)
    held = replace(config, scheme=scheme, intermediate_size=cut.intermediate_size, held_experts=len(part.experts))
    return _packed_bytes(held, storage, source.input_scales)


_packed_bytes = lru_cache(experts_bytes)  # layers and ranks have the same few sizes


# ---- traffic -------------------------------------------------------------------------------------------------------


def token_bytes(scheme: Scheme, hidden_size: int) -> int:
    """Bytes of a token on its way to experts: as the first product has it where that is int8 per token, else floats."""
    if scheme.product_activations == PER_TOKEN_INT8:
        return hidden_size + _SCALE_AND_ZERO_POINT
    return hidden_size * cpu.float_dtype()[0].itemsize


def chance_of_use(expert_count: int, per_token: int, held: int) -> float:
    """How likely a token goes to one or more of ``held`` experts, where every choice is as likely as any other."""
    return 1 - comb(expert_count - held, per_token) / comb(expert_count, per_token)


def _sent_by_rank(source: ExpertSource, layout: ParallelLayout, nodes: int, held: Sequence[int]) -> list[Traffic]:
    """What each rank is expected to send for one token in one layer, where ranks have ``held`` experts.

    The ids and weights of a token's experts are not counted.
    """
    config, count = source.config, len(held)
    sums = config.hidden_size * _SUM_BYTES
    if layout.chosen_exchange is None:
        return [Traffic()]
    if layout.chosen_exchange is Exchange.ALL_REDUCE:
        # A token that all ranks have. In a ring, every rank sends each of n parts of the sums on to the next one, but
        # for one part, and then does so with the finished sums.
        around = 2 * (count - 1) / count * sums
        last_of_node = [nodes > 1 and (rank + 1) % (count // nodes) == 0 for rank in range(count)]
        return [Traffic(0.0, around) if is_last else Traffic(around) for is_last in last_of_node]
    # Each rank has a token of its own. It sends that one to the others, or to those that have an expert of it, and
    # sends back the sums of the tokens that it got.
    token, chance = token_bytes(config.scheme, config.hidden_size), [1.0] * count
    if layout.chosen_exchange is Exchange.ALL_TO_ALL:
        chance = [chance_of_use(config.experts, source.layout.per_token, number) for number in held]
    sent = []
    for rank, own in enumerate(chance):
        on_node = count // nodes
        first = rank // on_node * on_node
        here = sum(chance[first : first + on_node])
        sent.append(
            Traffic(
                (here - own) * token + (on_node - 1) * own * sums,
                (sum(chance) - here) * token + (count - on_node) * own * sums,
            )
        )
    return sent
