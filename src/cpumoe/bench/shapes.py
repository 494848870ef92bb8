"""Shapes of mixture-of-experts layers that are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One mixture-of-experts layer."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    activation: str = "silu"
    load: tuple[float, ...] | None = None  # relative load of each expert; None if all are alike

    def operations(self, tokens: int) -> float:
        """Integer multiplications and additions of one call."""
        return 2.0 * tokens * self.topk * 3 * self.hidden * self.intermediate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("deepseek-v2-lite", 2048, 1408, 64, 6),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4, "swiglu_oai"),
    )
}
