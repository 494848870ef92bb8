"""Packed experts in models that do more with them than call them: a norm after each, identity experts, own routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.layout.expert_modules import POST_EXPERT_NORM, Marks, Role

#: Name of the packed experts inside a module of this file.
PACKED = "packed"


class NormedExperts(nn.Module):
    """Experts whose results go through a norm, each by itself, before they are weighed and added."""

    def __init__(self, experts: nn.Module, packed: nn.Module) -> None:
        super().__init__()
        self.packed = packed
        self.post_expert_norm = getattr(experts, POST_EXPERT_NORM)

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[tokens, H], [tokens, K], [tokens, K] -> [tokens, H]."""
        per_token = ids.shape[1]
        each = hidden_states.repeat_interleave(per_token, 0)  # [tokens * K, H]: one expert for each row
        one = torch.ones((each.shape[0], 1), dtype=torch.float32)
        out = self.post_expert_norm(self.packed(each, ids.reshape(-1, 1), one)) * weights.reshape(-1, 1)
        total: Tensor = out.unflatten(0, (-1, per_token)).sum(1)
        return total.to(hidden_states.dtype)


class IdentityExperts(nn.Module):
    """Experts of which the last ones are the token itself: their ids follow those of the packed ones."""

    def __init__(self, experts: nn.Module, packed: nn.Module) -> None:
        super().__init__()
        self.packed = packed
        self.expert_count = len(experts.down_proj)  # type: ignore[arg-type]

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[tokens, H], [tokens, K], [tokens, K] -> [tokens, H]."""
        is_identity = ids >= self.expert_count
        share = (weights * is_identity).sum(-1, keepdim=True)
        computed = self.packed(hidden_states, ids.masked_fill(is_identity, -1), weights)
        total: Tensor = computed + (hidden_states * share).to(hidden_states.dtype)
        return total


class RoutedTokens(nn.Module):
    """Llama 4's mixture of experts, which runs every token through every expert: here through those it is routed to.

    The routing weight multiplies the token before the first product.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts: Any = block
        self.experts, self.router, self.shared_expert = parts.experts, parts.router, parts.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [tokens, H]
        scores, logits = self.router(x)  # [tokens, experts], zeros for experts that were not chosen
        weights, ids = scores.float().topk(self.router.top_k, dim=-1)
        routed = self.experts(x, ids, weights, apply_router_weight_on_input=True)
        return self.shared_expert(x) + routed, logits


class Sequences(nn.Module):
    """Experts that are called with [batch, length, hidden] and give that back."""

    def __init__(self, _: nn.Module, packed: nn.Module) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[B, T, H], [B * T, K], [B * T, K] -> [B, T, H]."""
        out: Tensor = self.packed(hidden_states.reshape(-1, hidden_states.shape[-1]), ids, weights)
        return out.view(hidden_states.shape)


class RoutingBlock(nn.Module):
    """JetMoE's mixture of experts: softmax over the chosen logits, and one bias for all experts."""

    def __init__(self, block: nn.Module, packed: nn.Module) -> None:
        super().__init__()
        parts: Any = block
        self.packed, self.router, self.bias = packed, parts.router, parts.bias

    def forward(self, layer_input: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        x = layer_input.reshape(-1, layer_input.shape[-1])
        order, _, gates, counts, _ = self.router(x)  # of all tokens' choices, sorted by experts
        experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        ids, weights = torch.empty_like(experts), torch.empty_like(gates)
        ids[order], weights[order] = experts, gates
        per_token = (-1, self.router.top_k)
        out: Tensor = self.packed(x, ids.view(per_token), weights.view(per_token))
        total: Tensor = out.view(layer_input.shape) + self.bias
        return total


_AROUND: dict[Role, Callable[[nn.Module, nn.Module], nn.Module]] = {
    Role.NORMED: NormedExperts,
    Role.WITH_IDENTITIES: IdentityExperts,
    Role.KEEPING_SEQUENCES: Sequences,
    Role.ROUTING: RoutingBlock,
}


def wrapped(marks: Marks, experts: nn.Module, packed: nn.Module) -> nn.Module:
    """What takes the place of an experts module: the packed experts, or a module around them."""
    return _AROUND[marks.role](experts, packed) if marks.role in _AROUND else packed


def put_packed(model: nn.Module, name: str, marks: Marks, packed: nn.Module) -> str:
    """Puts packed experts (or what stands for them) in the place of the experts ``name``; returns their new name."""
    parent_name, _, child = name.rpartition(".")
    place = wrapped(marks, model.get_submodule(name), packed)
    setattr(model.get_submodule(parent_name), child, place)
    if marks.role is Role.WEIGHING_TOKENS:
        owner, _, block = parent_name.rpartition(".")
        setattr(model.get_submodule(owner), block, RoutedTokens(model.get_submodule(parent_name)))
    return name if place is packed else f"{name}.{PACKED}"


def experts_name(name: str) -> str:
    """The name that the model has for experts of which the packed ones are ``name``."""
    return name.removesuffix(f".{PACKED}")
