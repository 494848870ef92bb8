"""How often experts are chosen: what a placement of them is planned from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LoadCounter:
    """How often each expert of each layer was chosen; old choices may fade.

    ``counts`` has for each layer a tensor [experts] with the number of times that each expert was chosen: int64, or
    float64 where choices fade. ``tokens`` is the number of tokens that the layer got. A token that is computed twice
    counts twice, because this is the load on the experts.
    """

    def __init__(self, num_experts: Mapping[str, int], half_life: float | None = None) -> None:
        """Starts with nothing.

        Args:
            num_experts: the number of experts of each layer, by the layer's name.
            half_life: tokens of a layer after which a choice counts half; None forgets nothing.
        """
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life={half_life}; a number above 0, or None, is accepted")
        self.half_life = half_life
        dtype = torch.int64 if half_life is None else torch.float64
        self.counts = {layer: torch.zeros(count, dtype=dtype) for layer, count in num_experts.items()}
        self.tokens = dict.fromkeys(num_experts, 0)

    def add(self, layer: str, topk_ids: Tensor) -> None:
        """Counts one call of a layer. ``topk_ids``: [tokens, K] int32 or int64."""
        counts, tokens = self.counts[layer], topk_ids.shape[0]
        # Ids outside the range mean an expert on another rank: -1, or the number of experts in transformers.
        here = (topk_ids >= 0) & (topk_ids < len(counts))
        weights = None
        if self.half_life is not None:
            # Every token by itself fades all before it, so that it does not matter how tokens are cut into calls.
            age = torch.arange(tokens - 1, -1, -1, dtype=torch.float64, device=topk_ids.device)
            weights = (0.5 ** (age / self.half_life)).unsqueeze(1).expand(topk_ids.shape)[here]
            counts *= 0.5 ** (tokens / self.half_life)
        counts += torch.bincount(topk_ids[here], weights, minlength=len(counts)).to(counts.device)
        self.tokens[layer] += tokens

    def loads(self, layer: str) -> list[float]:
        """The load of each expert of a layer."""
        return [float(count) for count in self.counts[layer].tolist()]
