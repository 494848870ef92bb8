"""What ranks do in test_ranked_steps.py: a server's engine on the first of them, which the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rank_processes import Cases

import cpumoe
from cpumoe import ParallelLayout
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.native_decoder import NativeDecoder
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.rank_runner import Balancing, follow_steps, runner_for
from cpumoe.steps.request import Failure, Job
from cpumoe.steps.sampling import Sampling, Token

_SECONDS = 60.0  # at most, for things that take milliseconds
_POISON = [5, 290, 5, 290, 11]  # a prompt that ranks of other groups than the first cannot read

_LAYOUTS = {
    "tp ep": ParallelLayout(tp_size=2, expert_parallel=True),
    "dp ep": ParallelLayout(dp_size=2, expert_parallel=True),
    "dp": ParallelLayout(dp_size=2),
    "tp dp ep": ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True),
    "tp dp ep by expert": ParallelLayout(
        tp_size=2, dp_size=2, expert_parallel=True, exchange=Exchange.ALL_TO_ALL
    ),
}  # fmt: skip


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class _Asked:
    """A job that was given to an engine, and what came of it."""

    def __init__(
        self, engine: StepEngine, prompt: list[int], count: int, at_first_token: Callable[[], object] = lambda: None
    ) -> None:
        self.items: list[Any] = []
        self._count, self._at_first_token = count, at_first_token
        self.job = Job(prompt, count, frozenset(), Sampling(), self._take)
        engine.add(self.job)

    def _take(self, item: Any) -> None:
        self.items.append(item)
        if len(self.items) == 1:
            self._at_first_token()

    @property
    def end(self) -> Any:
        _until(lambda: self.items and not isinstance(self.items[-1], Token))
        return self.items[-1]

    @property
    def tokens(self) -> list[int]:
        assert self.end == "length", self.end
        assert len(self.items) == self._count + 1
        return [item.id for item in self.items[:-1]]


def _prompts(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(4, 290, (length,), generator=random).tolist() for length in lengths]


def _watch(native: NativeDecoder, is_poisoned: bool) -> list[int]:
    """The number of rows of each step of this rank; of the poison the core gets tokens that it refuses."""
    compute, rows = native.step_rows, []

    def step_rows(model: Any, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return compute(model, tokens + 10**6 if is_poisoned and tokens.tolist() == _POISON else tokens, *others)

    native.step_rows = step_rows  # type: ignore[method-assign]
    return rows


def serve(folder: str, name: str) -> dict[str, Any]:
    """All cases of one layout. Returns their outcomes (of the first rank), and the rows of each step of this rank."""
    ranks = Ranks.join(_LAYOUTS[name], timeout=30)
    with ranks.together():
        model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32, ranks=ranks)
        native = native_with_head(model)
        assert native is not None
        rows = _watch(native, is_poisoned=ranks.rank >= ranks.group.size)
        if ranks.rank > 0:
            follow_steps(PagedDecoder(model, native), ranks)
            return {"rows": rows}
        alone = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)
        balancing = Balancing(5, 1) if ranks.layout.uses_ep else None
        engine = StepEngine(runner_for(PagedDecoder(model, native), 20, 16, 8, ranks, balancing), 20, 16, 32, 8)
        try:
            assert engine.start() is None
            run = _Run(engine, alone, ranks.size // ranks.group.size)
            cases = Cases()
            for case in (run.one_request, run.many_requests, run.few_pages, run.what_is_known, run.a_step_that_fails):
                cases.run(f"{name}: {case.__name__}", case)
            if ranks.layout.uses_ep:
                cases.run(f"{name}: experts have moved", _experts_have_moved, model)
        finally:
            assert engine.stop()
        return {"rows": rows, "outcomes": cases.outcomes}


def lose_a_rank(folder: str, name: str) -> list[str]:
    """Steps until a rank is lost. Returns why the first one has ended, and what its requests were told."""
    ranks = Ranks.join(_LAYOUTS[name], timeout=20)
    with ranks.together():
        model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32, ranks=ranks)
        native = native_with_head(model)
        assert native is not None
        if ranks.rank > 0:
            follow_steps(PagedDecoder(model, native), ranks)
            return []
        engine = StepEngine(runner_for(PagedDecoder(model, native), 2000, 16, 8, ranks), 2000, 16, 32, 8)
        assert engine.start() is None
        asked = [_Asked(engine, prompt, 8000) for prompt in _prompts(3, 30, 7)]
        _until(lambda: all(one.items for one in asked))
        print("at steps", flush=True)
        ends = [one.end for one in asked]
        _until(lambda: engine.problem)
        assert engine.stop()
        return [str(engine.lost), *(end.sentence for end in ends)]


class _Run:
    """Cases of an engine, whose answers must be those of a model in one process."""

    def __init__(self, engine: StepEngine, alone: Any, groups: int) -> None:
        self._engine, self._alone, self._groups = engine, alone, groups

    def _expected(self, prompt: list[int], count: int) -> list[int]:
        found = self._alone.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens

    def _all_are_right(self, prompts: list[list[int]], count: int) -> None:
        expected = [self._expected(prompt, count) for prompt in prompts]
        asked = [_Asked(self._engine, prompt, count) for prompt in prompts]
        assert [one.tokens for one in asked] == expected

    def one_request(self) -> None:
        """All groups but one have no rows."""
        self._all_are_right(_prompts(50), 12)

    def many_requests(self) -> None:
        """Of any length, some of which are read in pieces while others go on."""
        self._all_are_right(_prompts(1, 2, 7, 8, 9, 31, 32, 33, 70, 3, 100), 10)

    def few_pages(self) -> None:
        """Some sequences give their pages back and are computed again."""
        self._all_are_right(_prompts(*[60 + 5 * (i % 3) for i in range(4 * self._groups)]), 60)

    def what_is_known(self) -> None:
        """A prompt that goes on from another goes where that one was computed."""
        beginning = list(range(20, 84))  # begins as no other prompt of these cases does
        first = _Asked(self._engine, beginning, 4)
        assert first.tokens
        _until(lambda: self._engine._schedules.is_idle)
        longer = _Asked(self._engine, [*beginning, 5, 6, 7], 4)
        assert longer.tokens == self._expected([*beginning, 5, 6, 7], 4)
        known = [group.known_pages(longer.job) for group in self._engine._schedules.groups]
        assert sorted(known)[:-1] == [0] * (self._groups - 1)

    def a_step_that_fails(self) -> None:
        """A group refuses its rows: the requests of that step fail, and what comes later is computed."""
        if self._groups == 1:
            return
        prompt = [7] * 20  # no group has it in its prefix cache, so that the first one takes it
        _until(lambda: self._engine._schedules.is_idle)
        refused: list[_Asked] = []
        # The engine's thread adds it between two steps: the first group is busy with `long`, so that another takes it.
        long = _Asked(self._engine, prompt, 200, lambda: refused.append(_Asked(self._engine, _POISON, 4)))
        _until(lambda: refused)
        for one in (long, *refused):
            assert isinstance(one.end, Failure)
            assert "could not compute" in one.end.sentence
        assert self._engine.problem is None
        self._all_are_right([prompt, prompt, prompt], 4)


def _experts_have_moved(model: Any) -> None:
    layers = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    assert any(layer.placement.logical != tuple(range(layer.config.experts)) for layer in layers)
