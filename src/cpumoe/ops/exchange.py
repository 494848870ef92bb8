"""Exchanges between ranks, and the operators of a layer that is spread over them."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe._core import CarriedExchange, RankExchange, SharedExchange
from cpumoe.ops.registration import register

__all__ = [
    "CarriedExchange",
    "RankExchange",
    "SharedExchange",
    "choose_slots",
    "expert_sums",
    "number_exchange",
    "prepare_tokens",
    "prepared_token_bytes",
]

#: Operators take numbers: those of exchanges in use. 0 is none.
_numbers = itertools.count(1)
_exchanges: weakref.WeakValueDictionary[int, RankExchange] = weakref.WeakValueDictionary()


def number_exchange(exchange: RankExchange) -> int:
    """The number by which operators know an exchange for as long as it lives."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


def _exchange_of(number: int) -> RankExchange | None:
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


def choose_slots(topk_ids: Tensor, copies: tuple[Tensor, Tensor] | None, first_token: int, loads: Tensor) -> Tensor:
    """int32 [tokens, K]: the slots that tokens go to; counts the experts that they have chosen in ``loads``.

    One call, because a dozen operators would take longer than the messages.

    Args:
        topk_ids: int32 or int64 [tokens, K], experts or -1.
        copies: int32 [experts + 1] and int32 [slots]: where the slots of each expert begin, and all slots by expert;
            None where an expert is its own slot.
        first_token: the number of the first token; copies take turns.
        loads: int64 [experts].
    """
    out = torch.empty(topk_ids.shape, dtype=torch.int32)
    begins, slots = (None, None) if copies is None else copies
    _core.choose_slots(topk_ids.contiguous(), begins, slots, first_token, loads, out)
    return out


def _prepare_tokens(hidden_states: Tensor, gate_up: Tensor) -> Tensor:
    x = hidden_states.contiguous()
    out = torch.empty((x.shape[0], prepared_token_bytes(gate_up, x.dtype)), dtype=torch.uint8)
    _core.prepare_tokens(x, gate_up, out)
    return out


def _prepare_tokens_fake(hidden_states: Tensor, gate_up: Tensor) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return hidden_states.new_empty((hidden_states.shape[0], size), dtype=torch.uint8)


# [tokens, H] -> [tokens, bytes] as the first product wants them: what it would make of them anyway.
prepare_tokens = register(
    "prepare_tokens(Tensor hidden_states, Tensor gate_up) -> Tensor", _prepare_tokens, _prepare_tokens_fake
)


def _expert_sums(
    tokens: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden_size: int,
    dtype: torch.dtype,
    activation: int,
    gated: bool,
    alpha: float,
    limit: float,
    apply_router_weight_on_input: bool,
    slices: int,
) -> Tensor:
    out = torch.empty((tokens.shape[0], hidden_size), dtype=torch.float32)
    _core.moe(
        tokens.contiguous(),
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        gate_up,
        down,
        out,
        activation,
        gated,
        alpha,
        limit,
        apply_router_weight_on_input,
        _DTYPES[dtype] if tokens.dtype == torch.uint8 else -1,
        _exchange_of(slices),
    )
    return out


def _expert_sums_fake(tokens: Tensor, *others: object) -> Tensor:
    return tokens.new_empty((tokens.shape[0], others[4]), dtype=torch.float32)  # type: ignore[arg-type]


# The fp32 sums of one rank's experts or slices: tokens [tokens, H], or as prepare_tokens has left them, which were of
# ``dtype``. ``slices``: the number of the exchange of ranks that have slices of the same experts, else 0.
expert_sums = register(
    "expert_sums(Tensor tokens, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, int hidden_size, "
    "ScalarType dtype, int activation, bool gated, float alpha, float limit, bool apply_router_weight_on_input, "
    "int slices) -> Tensor",
    _expert_sums,
    _expert_sums_fake,
)
