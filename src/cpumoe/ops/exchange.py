"""Exchanges between ranks, and the experts of a layer that is spread over them."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe._core import CarriedExchange, RankExchange, SharedExchange

if TYPE_CHECKING:
    from cpumoe.ops.decoder import PackedExperts

__all__ = [
    "CarriedExchange",
    "RankExchange",
    "SharedExchange",
    "choose_slots",
    "exchange_of",
    "number_exchange",
    "prepared_token_bytes",
    "spread_experts",
]

#: Operators take numbers: those of exchanges in use. 0 is none.
_numbers = itertools.count(1)
_exchanges: weakref.WeakValueDictionary[int, RankExchange] = weakref.WeakValueDictionary()


def number_exchange(exchange: RankExchange) -> int:
    """The number by which operators know an exchange for as long as it lives."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


def exchange_of(number: int) -> RankExchange | None:
    """The exchange that has a number; None for 0."""
    if number == 0:
        return None
    exchange = _exchanges.get(number)
    if exchange is None:
        raise ValueError(f"slices={number}; no exchange of that number is in use")
    return exchange


#: In the numbers of the core.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def prepared_token_bytes(gate_up: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a token of ``dtype`` as the first product wants it; 0 where it is prepared for each expert anew."""
    return int(_core.prepared_token_bytes(gate_up, _DTYPES[dtype]))


def choose_slots(topk_ids: Tensor, copies: tuple[Tensor, Tensor], first_token: int, loads: Tensor) -> Tensor:
    """int32 [tokens, K]: the slots that tokens go to; counts the experts that they have chosen in ``loads``.

    Args:
        topk_ids: int32 or int64 [tokens, K], experts or -1.
        copies: int32 [experts + 1] and int32 [slots]: where the slots of each expert begin, and all slots by expert.
        first_token: the number of the first token; copies take turns.
        loads: int64 [experts].
    """
    out = torch.empty(topk_ids.shape, dtype=torch.int32)
    _core.choose_slots(topk_ids.contiguous(), *copies, first_token, loads, out)
    return out


def spread_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: PackedExperts[Tensor],
    first_token: int,
    exchange: RankExchange | None,
    group: RankExchange | None,
) -> Tensor:
    """fp32 [tokens, H]: the sums over the chosen experts on all ranks, which all call it.

    Args:
        hidden_states: [tokens, H] of this rank.
        topk_ids: int32 or int64 [tokens, K], experts of the whole layer or -1. topk_weights: [tokens, K].
        experts: what this rank has of the layer, and where its tokens go.
        first_token: the number of the first token; copies of an expert take turns.
        exchange: of all ranks; None for one.
        group: of the ranks that have the same tokens, which each send a share of them; None for one.
    """
    if not topk_weights.is_floating_point():
        raise ValueError(f"topk_weights are {topk_weights.dtype}; a floating point dtype is accepted")
    out = torch.empty(hidden_states.shape, dtype=torch.float32)
    weights = topk_weights.to(torch.float32).contiguous()
    x, ids = hidden_states.contiguous(), topk_ids.contiguous()
    _core.spread_experts(x, ids, weights, experts, first_token, exchange, group, out)
    return out
