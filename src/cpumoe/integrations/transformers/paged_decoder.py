"""A model of transformers as the engine's runners call it: its native decoder over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cpumoe.integrations.transformers.native_decoder import NativeDecoder
from cpumoe.integrations.transformers.recognition.values import UnsupportedDecoder
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.steps.runner import ModelChanged, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PagedDecoder:
    """See :class:`cpumoe.steps.runner.PagedModel`.

    Args:
        native: the native decoder of ``model``, to logits.
    """

    def __init__(self, model: PreTrainedModel, native: NativeDecoder) -> None:
        self._model = model
        self._native = native

    @property
    def vocabulary(self) -> int:
        return self._native.decoder.model.embedding.shape[0]

    @property
    def has_states(self) -> bool:
        return self._native.state_bytes > 0

    @property
    def spread_experts(self) -> list[ParallelExperts]:
        return [module for module in self._model.modules() if isinstance(module, ParallelExperts)]

    def new_pages(self, pages: int, page_tokens: int, sequences: int) -> list[tuple[Tensor, ...]]:
        return self._native.new_pages(pages, page_tokens, sequences)

    def step(self, rows: Rows, page_tokens: int, caches: Any) -> Tensor:
        where = rows.lines, rows.places, rows.table, page_tokens, caches
        try:
            return self._native.step_rows(self._model, rows.tokens, *where, rows.wanted)
        except UnsupportedDecoder as problem:
            raise ModelChanged(str(problem)) from None

    def refresh(self) -> None:
        self._native.build_again(self._model)
