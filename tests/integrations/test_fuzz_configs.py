"""Fuzz configurations: with any one field changed, accelerated models compute what transformers computes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from changed_configs import changes_of
from every_architecture import FAMILIES, tiny_model

import cpumoe
from cpumoe import Experts, QuantizedLinear

#: Configurations of all families together; `make fuzz` asks for more.
EXAMPLES = int(os.environ.get("CPUMOE_FUZZ_EXAMPLES", "60"))
_REFUSED = (ValueError, cpumoe.CpumoeError)  # what models of sizes that we do not support raise
_LEAST_ROWS = 10  # of some 80 that must be left to compare
_TOLERANCE = 1e-3  # relative, of a token's row; everything is in fp32

#: Those whose forward takes tokens and a cache, and gives hidden states or logits.
CAUSAL = sorted(FAMILIES.keys() - {"diffusion_gemma", "openai_privacy_filter"})


def change_of(name: str, number: int) -> tuple[str, Any]:
    """Return one of a sample of a family's changes. Raises IndexError if it has fewer."""
    changes = changes_of(name)
    return random.Random(name).sample(changes, len(changes))[number]


_WHOLE = (40,)
#: Where prompts are cut; a model of transformers may not continue a prompt with several tokens (MiniMax).
_CUTS = ((30, 38, 39, 40), (38, 39, 40), _WHOLE)


def results(model: Any, cuts: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield hidden states or logits of a batch, with padding, at far positions, and of packed sequences.

    A prompt is read in chunks that end at ``cuts``.
    """
    ids = torch.randint(3, 98, (2, 40), generator=torch.Generator().manual_seed(11))
    for case in ("batch", "padding", "far", "packed"):
        mask = torch.ones_like(ids)
        positions = torch.arange(ids.shape[1]).repeat(2, 1)
        if case == "padding":
            mask[0, :7] = 0
            positions[0] = (mask[0].cumsum(0) - 1).clamp(min=0)
        elif case == "far":
            positions += torch.tensor([[50], [240]])  # across the borders of rotary scaling and of the context
        elif case == "packed":
            positions %= 13
        cache, out = None, []
        for first, last in pairwise((0, *(cuts if case != "packed" else _WHOLE))):
            options: dict[str, Any] = {} if case == "packed" else {"attention_mask": mask[:, :last]}
            given = model(
                input_ids=ids[:, first:last],
                position_ids=positions[:, first:last],
                past_key_values=cache,
                use_cache=True,
                **options,
            )
            cache = given.past_key_values
            out.append(given.logits if hasattr(given, "logits") else given.last_hidden_state)
        yield case, torch.cat(out, 1)[mask.bool()]


def first_that_runs(model: Any) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
    """Return the cuts that a model's own classes can read prompts with, and their results."""
    for cuts in _CUTS[:-1]:
        with torch.no_grad(), suppress(Exception):
            return cuts, dict(results(model, cuts))
    with torch.no_grad():
        return _WHOLE, dict(results(model, _WHOLE))


def unsettled_rows(model: Any, results_of_model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return which rows change with noise in the last bits of the embeddings: near ties of experts or indexed tokens.

    NaN and infinity count too: in transformers they spread from padding to other tokens.
    """
    weight = model.get_input_embeddings().weight.data
    before, noise = weight.clone(), torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    weight *= 1 + 1e-6 * noise
    changed = dict(results(model, _WHOLE))
    weight.copy_(before)
    return {case: ~near_rows(changed[case], rows) for case, rows in results_of_model.items()}


def near_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return which rows agree; none that has NaN or infinity."""
    return (found - expected).norm(dim=-1) <= _TOLERANCE * expected.norm(dim=-1).clamp(min=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("number", range(-(-EXAMPLES // len(CAUSAL))))
def test_accelerated_models_follow_every_field(name, number):
    try:
        field, value = change_of(name, number)
    except IndexError:
        pytest.skip("this family has no more fields")
    try:
        model = tiny_model(name, **{field: value})
        part: Any = getattr(model, FAMILIES[name].forward) if FAMILIES[name].forward else model
        with torch.no_grad():
            whole = dict(results(part, _WHOLE))
            unsettled = unsettled_rows(part, whole)
            if any(int((~rows).sum()) < _LEAST_ROWS for rows in unsettled.values()):
                pytest.skip(f"{field}={value}: hardly a row is settled")
    except Exception as problem:
        pytest.skip(f"its own classes do not run with it ({type(problem).__name__}: {problem})")
    cuts, in_chunks = first_that_runs(part)
    try:
        cpumoe.accelerate(model, "fp32")
    except _REFUSED as refusal:
        changed = [path for path, module in model.named_modules() if isinstance(module, Experts | QuantizedLinear)]
        assert not changed, f"{field}={value}: {changed[0]} was packed before accelerate raised {refusal!r}"
        assert not getattr(model, "is_quantized", False), f"{field}={value}: is_quantized is set after {refusal!r}"
        pytest.skip(f"refused: {refusal}")
    with torch.no_grad():
        for case, found in results(part, cuts):
            # transformers' own results may depend on the cuts: rotary scaling by length, Jamba's states.
            near = [near_rows(found, expected[case]) | unsettled[case] for expected in (in_chunks, whole)]
            far = min(int((~rows).sum()) for rows in near)
            assert not far, f"{field}={value}, {case}: {far} of {len(found)} rows differ"
