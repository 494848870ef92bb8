"""Llama 4: transformers runs every token through every expert; here each token goes to the experts it is routed to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.packed_modules import PendingModule, replace_module
from cpumoe.layers.experts import Experts


class Llama4Moe(nn.Module):
    """Llama 4's mixture of experts with routing. The routing weight multiplies the token before the first product."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts: Any = block
        self.top_k: int = parts.top_k
        self.experts, self.router, self.shared_expert = parts.experts, parts.router, parts.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [tokens, H]
        logits = nn.functional.linear(x, self.router.weight)
        values, ids = torch.topk(logits, self.top_k, dim=-1)
        routed = self.experts(x, ids, torch.sigmoid(values.float()), apply_router_weight_on_input=True)
        return self.shared_expert(x) + routed, logits


def adapt_llama4(model: nn.Module) -> None:
    """Puts a Llama4Moe in the place of every block whose experts are packed or are about to be."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Llama4TextMoe" and isinstance(module.experts, PendingModule | Experts):
            replace_module(model, name, Llama4Moe(module))
