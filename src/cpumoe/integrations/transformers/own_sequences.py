"""Data parallel ranks that generate sequences of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cpumoe.integrations.transformers.adapter import explanation, native_of, native_with_head
from cpumoe.parallel.experts import ParallelExperts


@contextmanager
def own_sequences(model: Any) -> Iterator[None]:
    """Inside, every data parallel rank calls the model with sequences of its own, as often as it likes.

    The experts are on all ranks, which therefore compute every step together. At the end, a rank that has nothing more
    to compute goes on helping the others until all of them are there. If one fails, the others get a RankError.

    Args:
        model: from :func:`cpumoe.load_model` on several ranks. On one, nothing is to be done.

    Raises ValueError for a model whose steps go through transformers, layer by layer: there, all ranks have to make the
    same number of calls.
    """
    ranks = next((module.ranks for module in model.modules() if isinstance(module, ParallelExperts)), None)
    if ranks is None or ranks.layout.has_all_tokens:
        yield
        return
    native = native_with_head(model) or next(filter(None, map(native_of, model.modules())), None)
    if native is None:
        raise ValueError(f"ranks cannot have sequences of their own: {explanation(model)}")
    with ranks.together():
        yield
        while native.decoder.help():
            pass
