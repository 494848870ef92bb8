"""Experts that are spread over ranks.

A rank computes the fp32 sums of its own experts or slices. These are added in the order of the ranks and rounded once,
so that all ranks have the same bits. One process adds the experts of a token one after another, ranks add the sums of
theirs: results differ from those of one process in the last bits of fp32 (1e-6), unless a token has one expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import Exchange, ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.ops.decoder import Copies, PackedExperts, Travel
from cpumoe.ops.exchange import prepared_token_bytes, spread_experts
from cpumoe.parallel.placement import Placement
from cpumoe.parallel.ranks import Ranks

_TRAVEL = {
    Exchange.ALL_REDUCE: Travel.STAY,
    Exchange.ALLGATHER_REDUCESCATTER: Travel.TO_ALL,
    Exchange.ALL_TO_ALL: Travel.TO_EXPERTS,
}


class ParallelExperts(Experts):
    """The experts of one layer on all ranks, called on each of them as :class:`cpumoe.Experts` is.

    With data, context or sequence parallelism every rank gives tokens of its own, as many as it has, or none. In a
    tensor parallel group all ranks give the same tokens.

    Args:
        own: what this rank has of the experts; None where it has none of them.
        config: of the whole layer.
        ranks: the ranks, their layout, and how they exchange.
        placement: which rank has which experts; None: that of the layout.
        quantized_dispatch: tokens travel as the first product would quantise them anyway, which gives the same bits.
            None: where that is fewer bytes.

    Attributes:
        held: what is here.
        placement: which rank has which experts; None where each has a slice of all of them.
        loads: int64 [experts], how often each has been chosen by tokens of this rank.
    """

    def __init__(
        self,
        own: Experts | None,
        config: MoEConfig,
        ranks: Ranks,
        *,
        placement: Placement | None = None,
        quantized_dispatch: bool | None = None,
    ) -> None:
        backend = NativeBackend() if own is None else own.backend
        if not isinstance(backend, NativeBackend):
            raise ValueError(f"experts on the backend {backend.name!r}; spread over ranks, 'native' is accepted")
        super().__init__(config, backend, {} if own is None else dict(own.named_buffers()))
        self.ranks = ranks
        self.loads = torch.zeros(config.experts, dtype=torch.int64)
        self._tokens = 0  # that have come, so that copies take turns
        self._quantized_dispatch = quantized_dispatch
        self.placement: Placement | None = None
        self._agreed = False
        self._copies: Copies | None = None
        self._in_core: dict[tuple[torch.dtype, bool], PackedExperts[Tensor]] = {}  # see _for_call
        layout = ranks.layout
        if layout.experts_tp_size > 1:
            if placement is not None:
                raise ValueError(f"a placement of experts, and the layout {layout} has a slice of each on every rank")
            self.held = layout.part_of(config.experts, config.intermediate_size)
        else:
            self._place(Placement.of_layout(config.experts, layout) if placement is None else placement)
        count = 0 if own is None else own.config.local_experts
        if count != len(self.held.experts):
            raise ValueError(f"{count} experts are held on rank {ranks.rank}; {self.held} are accepted")

    def _place(self, placement: Placement) -> None:
        if placement.rank_count != self.ranks.size or placement.expert_count != self.config.experts:
            raise ValueError(
                f"a placement of {placement}; {self.config.experts} experts on {self.ranks.size} ranks are accepted"
            )
        rank = self.ranks.rank
        self.placement = placement
        self._agreed = False
        self._in_core.clear()
        self.held = ExpertsPart(placement.experts_of(rank))
        first = placement.rank_of.index(rank) if self.held.experts else 0
        places = torch.tensor([slot - first if of == rank else -1 for slot, of in enumerate(placement.rank_of)])
        begins, slots = placement.slots_by_expert
        owners = torch.tensor(placement.rank_of)
        self._copies = Copies(begins, places[slots].to(torch.int32), owners[slots].to(torch.int32))

    def move(self, packed: Mapping[str, Tensor], placement: Placement) -> None:
        """Takes other experts in the place of those that are held: packed ones, as a placement has them here."""
        self._place(placement)
        for name in ("gate_up_packed", "down_packed"):
            self._buffers.pop(name, None)
        for name, tensor in packed.items():
            self.register_buffer(name, tensor)

    @property
    def travel(self) -> Travel:
        """Where the tokens of this rank go, for the core."""
        kind = self.ranks.layout.chosen_exchange
        return Travel.STAY if kind is None else _TRAVEL[kind]

    def for_core(self, dtype: torch.dtype) -> PackedExperts[Tensor]:
        """Returns these experts and their ranks as the core takes them, for tokens of ``dtype``."""
        travel = self.travel
        return replace(
            super().for_core(dtype),
            spread=bool(self.ranks),
            copies=self._copies,
            loads=self.loads,
            travel=travel,
            prepared_rows=travel is not Travel.STAY and self._sends_prepared(dtype),
        )

    def quantized(self, first: int = 0, count: int | None = None) -> QuantizedExperts:
        raise ValueError(f"rank {self.ranks.rank} has {self.held} of this layer, which cannot be read back as a whole")

    def extra_repr(self) -> str:
        return f"{self.held}; {self.ranks.layout}"

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        apply_router_weight_on_input: bool = False,
        fp32_out: bool = False,
    ) -> Tensor:
        """Computes the layer; see :meth:`cpumoe.Experts.forward`.

        Args:
            hidden_states: [tokens, H] of this rank.
            topk_ids: [tokens, K], of the whole layer. topk_weights: [tokens, K].

        Returns:
            [tokens, H] in the dtype of ``hidden_states``, or fp32.
        """
        ops.refuse_gradient(hidden_states=hidden_states, topk_weights=topk_weights)
        if self.ranks.layout.has_all_tokens:  # a mistake in these is found on all ranks alike
            out = self._added(hidden_states, topk_ids, topk_weights, apply_router_weight_on_input)
        else:
            with self.ranks.together():
                out = self._added(hidden_states, topk_ids, topk_weights, apply_router_weight_on_input)
        return out if fp32_out else out.to(hidden_states.dtype)

    def _added(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, on_input: bool) -> Tensor:
        """fp32 [tokens, H]: the sums of all ranks for the tokens of this one."""
        if not self._agreed:
            self._agree()
        layout = self.ranks.layout
        group = None if layout.sequence_parallel else self.ranks.group.exchange
        experts = self._for_call(hidden_states.dtype, on_input)
        out = spread_experts(hidden_states, topk_ids, topk_weights, experts, self._tokens, self.ranks.exchange, group)
        self._tokens += len(topk_ids)
        return out

    def _for_call(self, dtype: torch.dtype, on_input: bool) -> PackedExperts[Tensor]:
        """Return these experts as the core takes them, made once for the tensors that are held."""
        gate_up, down = (self._buffers.get(name) for name in ("gate_up_packed", "down_packed"))
        found = self._in_core.get((dtype, on_input))
        if found is None or found.gate_up is not gate_up or found.down is not down:
            kept = {k: e for k, e in self._in_core.items() if e.gate_up is gate_up and e.down is down}
            found = replace(self.for_core(dtype), weight_on_input=on_input)
            self._in_core = kept | {(dtype, on_input): found}
        return found

    def _agree(self) -> None:
        """Raise RankError on every rank if one has another layer, or another idea of who holds what."""
        where = "by slices" if self.placement is None else self.placement.by_rank
        dispatch = f"quantized_dispatch={self._quantized_dispatch}"
        self.ranks.agree("layer of experts", str(self.config), f"placement={where}", dispatch)
        self._agreed = True

    def _sends_prepared(self, dtype: torch.dtype) -> bool:
        """Whether tokens of this dtype travel as the first product wants them."""
        # A rank that has no experts does not know how the others want tokens.
        everywhere = self.placement is None or all(self.placement.by_rank)
        if self._quantized_dispatch is False or not everywhere:
            return False
        prepared = prepared_token_bytes(self.get_buffer("gate_up_packed"), dtype)
        fewer = prepared < self.config.hidden_size * dtype.itemsize
        return prepared > 0 and (fewer or self._quantized_dispatch is True)
