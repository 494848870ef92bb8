"""Recurrent states of the paged cache: snapshots, and steps that continue from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import cpumoe
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.steps import cache as paged_cache

PAGE_TOKENS = 16
PAGES = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2_moe", "qwen3_moe"])
def native(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Any:
    """The decoder of a model with delta nets, with short convolutions, or with attention alone."""
    model = cpumoe.load_model(family_folder(request.param), scheme="w4a8-g32", dtype=torch.float32)
    found = native_with_head(model)
    assert found is not None and (found.state_bytes > 0) == (request.param != "qwen3_moe")
    found.model = model  # it must live as long as its decoder
    return found


@pytest.mark.parametrize("is_int8", [False, True])
def test_steps_from_a_snapshot_have_the_same_bits(native: Any, is_int8: bool) -> None:
    layouts = native.decoder.cache_layouts
    caches = paged_cache.new_pages(layouts, PAGES.numel(), PAGE_TOKENS, len(PAGES), is_int8=is_int8)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 120, (2, 40), generator=random)

    def step(sequence: int, ids: torch.Tensor, computed: int) -> torch.Tensor:
        rows = torch.arange(len(ids))
        where = torch.full_like(rows, sequence), rows + computed, PAGES, PAGE_TOKENS
        return native.decoder.step_rows(ids, *where, caches, rows)

    def states() -> list[torch.Tensor]:
        return [paged_cache.snapshot(layouts, caches, sequence) for sequence in range(2)]

    step(0, tokens[0, :20], 0)
    step(1, tokens[1, :9], 0)
    saved, other = states()
    assert len(saved) == native.state_bytes and saved.dtype == torch.uint8
    expected, after = step(0, tokens[0, 20:], 20), states()[0]
    step(0, tokens[1, 9:16], 40)
    paged_cache.restore(layouts, caches, 0, saved)
    step(0, tokens[1, 20:24], 20)  # drafted tokens, which are rejected
    assert native.state_bytes == 0 or not torch.equal(states()[0], saved)
    paged_cache.restore(layouts, caches, 0, saved)
    assert torch.equal(step(0, tokens[0, 20:], 20), expected)
    assert torch.equal(states()[0], after) and torch.equal(states()[1], other)


def test_a_snapshot_is_restored_into_another_sequence(native: Any) -> None:
    layouts = native.decoder.cache_layouts
    caches = paged_cache.new_pages(layouts, 1, PAGE_TOKENS, 2, is_int8=False)
    for layer in caches:
        for tensor in layer:
            tensor.normal_(generator=torch.Generator().manual_seed(2))
    saved, before = (paged_cache.snapshot(layouts, caches, sequence) for sequence in (1, 0))
    paged_cache.restore(layouts, caches, 0, saved)
    assert torch.equal(paged_cache.snapshot(layouts, caches, 0), saved)
    assert native.state_bytes == 0 or not torch.equal(before, saved)
