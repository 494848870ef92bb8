"""Experts that are spread over ranks.

A rank computes the fp32 sums of its own experts or slices. These are added in the order of the ranks and rounded once,
so that all ranks have the same bits. One process adds the experts of a token one after another, ranks add the sums of
theirs: results differ from those of one process in the last bits of fp32 (1e-6), unless a token has one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import Exchange, ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.ops.exchange import expert_sums, prepare_tokens, prepared_token_bytes
from cpumoe.parallel.dispatch import (
    Tokens,
    gather_tokens,
    own_share,
    return_sums,
    scatter_sums,
    send_tokens,
    share_in_group,
)
from cpumoe.parallel.ranks import Ranks


class ParallelExperts(Experts):
    """The experts of one layer on all ranks, called on each of them as :class:`cpumoe.Experts` is.

    With data, context or sequence parallelism every rank gives tokens of its own, as many as it has, or none. In a
    tensor parallel group all ranks give the same tokens.

    Args:
        own: what this rank has of the experts; None where it has none of them.
        config: of the whole layer.
        ranks: the ranks, their layout, and how they exchange.
        quantized_dispatch: tokens travel as the first product would quantise them anyway, which gives the same bits.
            None: where that is fewer bytes.
    """

    def __init__(
        self, own: Experts | None, config: MoEConfig, ranks: Ranks, *, quantized_dispatch: bool | None = None
    ) -> None:
        parts = [rank.part_of(config.experts, config.intermediate_size) for rank in ranks.layout.ranks()]
        backend = NativeBackend() if own is None else own.backend
        if not isinstance(backend, NativeBackend):
            raise ValueError(f"experts on the backend {backend.name!r}; spread over ranks, 'native' is accepted")
        count = 0 if own is None else own.config.local_experts
        if count != len(parts[ranks.rank].experts):
            raise ValueError(f"{count} experts are held on rank {ranks.rank}; {parts[ranks.rank]} are accepted")
        super().__init__(config, backend, {} if own is None else dict(own.named_buffers()))
        self.held = parts[ranks.rank]
        self.ranks = ranks
        # Both have one entry more, for the id -1.
        self._places = _table(config.experts, [self.held], range(count))
        self._owners = _owners(config.experts, parts)
        self._slices = ranks.number if self.held.slices > 1 else 0
        # A rank that has no experts does not know how the others want tokens.
        self._may_prepare = quantized_dispatch is not False and all(part.experts for part in parts)
        self._must_prepare = quantized_dispatch is True

    @property
    def packed(self) -> tuple[Tensor, Tensor] | None:
        """The packed gate_up and down of what is here; None where nothing is."""
        return (self.get_buffer("gate_up_packed"), self.get_buffer("down_packed")) if self.held.experts else None

    @property
    def places(self) -> Tensor | None:
        """int32 [experts]: where each expert is among those that are here, or -1; None for slices of all of them."""
        return self._places[:-1] if self.held.slices == 1 else None

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
        mine = Tokens(hidden_states, self._checked(topk_ids), topk_weights.to(torch.float32), hidden_states.dtype)
        kind = self.ranks.layout.chosen_exchange
        if kind is None or kind is Exchange.ALL_REDUCE:
            return self.ranks.sum_(self._sums(mine, on_input))
        share = mine[own_share(self.ranks.layout, len(hidden_states))]
        sending = replace(share, rows=self._as_sent(share.rows))
        if kind is Exchange.ALL_TO_ALL:
            here, sent = send_tokens(self.ranks, sending, self._owners)
            out = return_sums(self.ranks, self._sums(here, on_input), sent, len(share.rows))
        else:
            everything, counts = gather_tokens(self.ranks, sending)
            out = scatter_sums(self.ranks, self._sums(everything, on_input), counts)
        return share_in_group(self.ranks, out, len(hidden_states))

    def _checked(self, ids: Tensor) -> Tensor:
        """Refused before they travel: on another rank it would be that one's error."""
        if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < self.config.experts:
            wrong = ids[(ids < -1) | (ids >= self.config.experts)][0]
            raise ValueError(
                f"topk_ids hold {int(wrong)}; 0 to {self.config.experts - 1} are experts and -1 means none"
            )
        return ids.to(torch.int32)

    def _as_sent(self, rows: Tensor) -> Tensor:
        if not self._may_prepare:
            return rows
        gate_up = self.get_buffer("gate_up_packed")  # every rank has some
        prepared = prepared_token_bytes(gate_up, rows.dtype)
        if prepared == 0:
            return rows
        fewer = prepared < rows.shape[1] * rows.element_size()
        return prepare_tokens(rows, gate_up) if fewer or self._must_prepare else rows

    def _sums(self, tokens: Tokens, on_input: bool) -> Tensor:
        """fp32 [tokens, H]: what this rank has of the sums."""
        c = self.config
        if self.packed is None:
            return torch.zeros((len(tokens.rows), c.hidden_size))
        return expert_sums(
            tokens.rows,
            self._places[tokens.ids.long()],
            tokens.weights,
            *self.packed,
            c.hidden_size,
            tokens.dtype,
            c.activation.kind,
            bool(c.activation.gated),
            *c.activation.parameters,
            on_input,
            self._slices,
        )


def _table(experts: int, parts: Sequence[ExpertsPart], values: Sequence[int]) -> Tensor:
    """int32 [experts + 1]: a value for each expert of the parts, in their order; -1 for others, and for the id -1."""
    table = torch.full((experts + 1,), -1, dtype=torch.int32)
    listed = [expert for part in parts for expert in part.experts]
    table[listed] = torch.tensor(list(values), dtype=torch.int32)
    return table


def _owners(experts: int, parts: Sequence[ExpertsPart]) -> Tensor:
    """int32 [experts + 1]: the rank of each expert. Of slices it is the last one that has some: nobody asks."""
    return _table(experts, parts, [rank for rank, part in enumerate(parts) for _ in part.experts])
