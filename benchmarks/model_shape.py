"""The shape of the whole model that is measured; without imports, because environments of other systems read it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Qwen3-30B-A3B with fewer layers than its 48: what all layers share is the same, and layers are alike."""

    layers: int
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    topk: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936
    positions: int = 40960

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the linears around attention, by their names in the checkpoint."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
        }

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Weights of the norms of one layer: before attention, before the experts, of queries, of keys."""
        return self.hidden, self.hidden, self.head_dim, self.head_dim
