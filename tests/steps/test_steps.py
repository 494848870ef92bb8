"""The engine that computes whole steps in the core: its pages, its schedule, and answers that depend on neither."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny_models import write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.integrations.transformers.recognition.values import UnsupportedDecoder
from cpumoe.steps import job_thread
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.group_schedules import GroupSchedules
from cpumoe.steps.page_pool import PagePool, page_name
from cpumoe.steps.request import Failure, Job
from cpumoe.steps.runner import CoreRunner
from cpumoe.steps.sampling import Sampling, Token
from cpumoe.steps.schedule import Schedule

SECONDS = 60.0  # at most, for things that take milliseconds


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- pages -----------------------------------------------------------------------------------------------------------

PAGES = 5


class Pool(RuleBasedStateMachine):
    """The pool of pages beside plain books of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.held: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}
        self.left: list[int] = []  # named pages that nobody holds, in the order in which they were left

    @precondition(lambda self: len(+self.held) < PAGES)
    @rule()
    def take(self) -> None:
        blank = PAGES - len(+self.held) - len(self.left)
        page = self.pool.take()
        assert not self.held[page]
        if blank == 0:
            assert page == self.left.pop(0)
            del self.names[page]
        else:
            assert page not in self.names
        self.held[page] = 1

    @precondition(lambda self: len(+self.held) == PAGES)
    @rule()
    def take_too_many(self) -> None:
        with pytest.raises(IndexError, match="all pages are held"):
            self.pool.take()

    @precondition(lambda self: +self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def give_name(self, data: st.DataObject, name: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(+self.held)))
        self.pool.give_name(page, name)
        if page not in self.names and name not in self.names.values():
            self.names[page] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hold(self, name: bytes) -> None:
        page = self.pool.find(name)
        assert (page is None) == (name not in self.names.values())
        if page is not None:
            assert self.names[page] == name and self.pool.is_held(page) == (self.held[page] > 0)
            self.pool.hold(page)
            self.held[page] += 1
            if page in self.left:
                self.left.remove(page)

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(+self.held)))
        self.pool.give_back(page)
        self.held[page] -= 1
        if not self.held[page] and page in self.names:
            self.left.append(page)

    @invariant()
    def all_are_counted(self) -> None:
        assert self.pool.available == PAGES - len(+self.held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_names_of_pages() -> None:
    first = page_name(b"", [1, 2])
    assert first == page_name(b"", [1, 2]) != page_name(b"", [2, 1]) and page_name(first, [3, 4]) != page_name(
        b"", [3, 4]
    )


# ---- schedules -------------------------------------------------------------------------------------------------------


@given(
    st.integers(2, 12),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(1, 14)), min_size=1, max_size=8),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_schedules(pages: int, step_rows: int, wishes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """A memory of what was written where shows every token all tokens before it, whoever computed them.

    The next token of a sequence depends on all tokens before it, as in a model.
    """
    size = 4
    schedule = Schedule(pages, size, step_rows)
    memory: list[list[tuple[int, ...]]] = [
        [()] * size for _ in range(pages)
    ]  # the beginning of the text up to that token
    waiting = [wish for wish in wishes if wish[1] + wish[2] <= schedule.tokens]
    delivered: dict[Job, list[Any]] = {}

    def successor(text: tuple[int, ...]) -> int:
        return hash(text) % 2

    for _ in range(3000):
        while waiting and (not schedule.sequences or data.draw(st.booleans())):
            first, length, count = waiting.pop()
            items: list[Any] = []
            # Two texts with few tokens: most prompts begin alike.
            job = Job([first % 2, *[0] * (length - 1)], count, frozenset(), Sampling(), items.append)
            delivered[job] = items
            schedule.add(job)
        if schedule.sequences and data.draw(st.integers(0, 9)) == 0:
            data.draw(st.sampled_from(schedule.sequences)).job.over = True
        schedule.drop_ended()
        if not schedule.sequences:
            if waiting:
                continue
            break
        pieces = schedule.next_step(data.draw(st.integers(1, step_rows)))
        assert pieces and 0 < sum(piece.count for piece in pieces) <= step_rows
        lines = [piece.sequence.line for piece in pieces]
        assert None not in lines and lines == sorted(set(lines))
        last = [piece for piece in pieces if piece.is_last]
        for piece in pieces:
            sequence = piece.sequence
            assert schedule.table[sequence.line, : len(sequence.pages)].tolist() == sequence.pages
            for place in range(sequence.computed, sequence.computed + piece.count):
                memory[sequence.pages[place // size]][place % size] = tuple(sequence.tokens[: place + 1])
        for sequence in schedule.sequences:  # nobody has written over what another one still needs
            for place in range(sequence.computed):
                assert memory[sequence.pages[place // size]][place % size] == tuple(sequence.tokens[: place + 1])
        schedule.advance(pieces)
        for piece in last:
            scores = torch.zeros(2)
            scores[successor(tuple(piece.sequence.tokens))] = 1
            token = piece.sequence.job.next_token(scores)
            assert token is not None
            piece.sequence.tokens.append(token)
    else:
        raise AssertionError("no end in sight")
    assert schedule.pool.available == pages
    for job, items in delivered.items():
        text = list(job.prompt)
        for item in items:
            if isinstance(item, Token):
                assert item.id == successor(tuple(text))
                text.append(item.id)
        assert job.over and (items[-1:] != ["length"] or len(items) == job.max_new_tokens + 1)


def counts_of(schedule: Schedule, prompt_rows: int) -> list[int]:
    """Computes a step of a schedule. Returns its rows by sequence, oldest first; the next token is always 1."""
    pieces = schedule.next_step(prompt_rows)
    rows = {piece.sequence: piece.count for piece in pieces}
    last = [piece.sequence for piece in pieces if piece.is_last]
    assert all(sequence.line is not None for sequence in rows)
    schedule.advance(pieces)
    for sequence in last:
        sequence.tokens.append(1)
    return [rows.get(sequence, 0) for sequence in schedule.sequences]


def scheduled(pages: int, step_rows: int, *prompts: list[int]) -> Schedule:
    schedule = Schedule(pages, 4, step_rows)
    for prompt in prompts:
        schedule.add(Job(prompt, 1000, frozenset(), Sampling(), lambda _: None))
    return schedule


def test_nobody_overtakes() -> None:
    schedule = scheduled(6, 100, [1] * 12, [2] * 12, [3])
    # There would be room for the third, but not for the second. The first may need one page more.
    assert counts_of(schedule, 100) == [12, 0, 0]
    schedule.sequences[0].job.over = True
    schedule.drop_ended()
    assert counts_of(schedule, 100) == [12, 1]


def test_who_has_begun_goes_on() -> None:
    """None begins while the pages that are left are needed by those that have begun."""
    schedule = scheduled(6, 8, [1] * 20, [2])
    assert [counts_of(schedule, 8) for _ in range(5)] == [[8, 0], [8, 0], [4, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize("pages", range(18, 22))
def test_older_sequences_take_pages_of_those_that_are_in_the_step_already(pages: int) -> None:
    """The second waits for what the first reads. Meanwhile the third begins; later the pages are too few for all."""
    schedule = scheduled(pages, 20, [0] * 18, [0] * 16 + [5] * 24, [7])
    assert counts_of(schedule, 1) == [18, 0, 1]
    seen = [counts_of(schedule, 1) for _ in range(26)]
    assert [1, 1, 1] in seen and [1, 1, 0] in seen
    assert all(counts[:2] == [1, 1] for counts in seen)


# ---- schedules of groups of ranks ------------------------------------------------------------------------------------


def grouped(count: int, pages: int = 100, step_rows: int = 100) -> GroupSchedules:
    return GroupSchedules([Schedule(pages, 4, step_rows) for _ in range(count)])


def add(groups: GroupSchedules, prompt: list[int]) -> int:
    """Adds a job; returns the group that it went to."""
    job = Job(prompt, 1000, frozenset(), Sampling(), lambda _: None)
    groups.add(job)
    return next(i for i, group in enumerate(groups.groups) if group.sequences and group.sequences[-1].job is job)


def computed(groups: GroupSchedules, prompt_rows: int) -> list[int]:
    """Computes a step; returns its rows by group. The next token is always 1."""
    pieces = groups.next_step(prompt_rows)
    for group, of_group in zip(groups.groups, pieces, strict=True):
        complete = [piece.sequence for piece in of_group if piece.is_last]
        group.advance(of_group)
        for sequence in complete:
            sequence.tokens.append(1)
    return [sum(piece.count for piece in of_group) for of_group in pieces]


def test_jobs_go_where_the_least_work_is() -> None:
    groups = grouped(3)
    assert groups.is_idle
    assert [add(groups, [i] * 20) for i in range(3)] == [0, 1, 2]
    assert add(groups, [9] * 3) == 0
    assert computed(groups, 100) == [23, 20, 20]
    assert add(groups, [10] * 50) == 1  # of equally many sequences, the first
    assert add(groups, [11] * 2) == 2
    groups.groups[1].sequences[0].job.over = True
    assert len(groups.drop_ended()) == 1 and not groups.is_idle
    assert add(groups, [12]) == 1
    assert add(groups, [13]) == 0  # equally many in all of them, and the first has nothing to read


def test_jobs_go_where_their_beginning_is_known() -> None:
    groups = grouped(2)
    (text,) = prompts_of([30])
    assert [add(groups, [5] * 9), add(groups, text)] == [0, 1]
    computed(groups, 100)
    for group in groups.groups:
        group.sequences[0].job.over = True
    groups.drop_ended()
    assert groups.is_idle
    assert add(groups, [*text[:12], 7]) == 1
    assert add(groups, [*text[:12], 8]) == 0  # that the other one has fewer sequences counts more


def test_no_group_lets_answers_of_others_wait() -> None:
    groups = grouped(2)
    add(groups, [5])
    assert computed(groups, 10) == [1, 0]
    add(groups, [6] * 50)
    assert computed(groups, 10) == [1, 10]
    groups.groups[0].sequences[0].job.over = True
    groups.drop_ended()
    assert computed(groups, 10) == [0, 40]


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In fp32; the second has windows and sinks, the third states."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)
    return cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)


@pytest.fixture
def sharing_model(model: Any) -> Any:
    """One whose pages are found again."""
    if native_with_head(model).state_bytes:
        pytest.skip("it has states behind all tokens, which nobody else can use")
    return model


@pytest.fixture
def steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step that is computed."""
    native = native_with_head(model)
    compute, steps = native.step_rows, []

    def count(base: Any, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        steps.append(len(tokens))
        return compute(base, tokens, *others)

    monkeypatch.setattr(native, "step_rows", count)
    return steps


def new_engine(
    model: Any, native: Any, pages: int, page_tokens: int, step_rows: int, sequences: int = 256
) -> StepEngine:
    runner = CoreRunner(PagedDecoder(model, native), pages, page_tokens, sequences)
    return StepEngine(runner, pages, page_tokens, step_rows, sequences)


@contextmanager
def engine_of(model: Any, pages: int = 256, page_tokens: int = 16, step_rows: int = 64) -> Iterator[StepEngine]:
    native = native_with_head(model)
    assert native is not None
    engine = new_engine(model, native, pages, page_tokens, step_rows)
    try:
        assert engine.start() is None
        yield engine
    finally:
        assert engine.stop()


GREEDY = Sampling()


def ask(engine: StepEngine, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> tuple[Job, list[Any]]:
    items: list[Any] = []
    job = Job(prompt, count, frozenset(), sampling, items.append)
    engine.add(job)
    return job, items


def is_over(items: list[Any]) -> bool:
    return bool(items) and not isinstance(items[-1], Token)


def tokens_of(items: list[Any], count: int) -> list[int]:
    until(lambda: is_over(items))
    assert items[-1] == "length" and len(items) == count + 1
    return [item.id for item in items[:-1]]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return tokens[0, len(prompt) :].tolist()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(4, 300, (length,), generator=random).tolist() for length in lengths]


def all_pages_are_free(engine: StepEngine, pages: int) -> bool:
    (schedule,) = engine._schedules.groups
    return not schedule.sequences and schedule.pool.available == pages


def test_eight_answers_together_are_those_of_generate(model: Any) -> None:
    prompts = prompts_of([1, 2, 15, 16, 17, 33, 70, 150])  # ends of pages and of steps among them
    expected = [generated(model, prompt, 40) for prompt in prompts]
    with engine_of(model) as engine:
        answers = [ask(engine, prompt, 40)[1] for prompt in prompts]
        assert [tokens_of(items, 40) for items in answers] == expected
        until(lambda: all_pages_are_free(engine, 256))


@pytest.mark.parametrize("step_rows", [1, 7, 1024])
def test_a_prompt_in_pieces(model: Any, step_rows: int, steps: list[int]) -> None:
    [prompt] = prompts_of([90])
    expected = generated(model, prompt, 5)
    with engine_of(model, step_rows=step_rows) as engine:
        steps.clear()
        assert tokens_of(ask(engine, prompt, 5)[1], 5) == expected
    assert max(steps) <= step_rows and sum(steps) == 90 + 4 and len(steps) == -(-90 // step_rows) + 4


def test_too_few_pages_for_all(model: Any, steps: list[int]) -> None:
    prompts = prompts_of([10, 20, 30, 40, 50, 3])
    samplings = [Sampling(temperature=1.5, seed=i) if i % 2 else Sampling(logprobs=2) for i in range(6)]
    rows = []
    answers = []
    for pages in (10, 256):  # ten are for 160 tokens; the longest answer needs 150 of them
        with engine_of(model, pages) as engine:
            steps.clear()
            asked = [ask(engine, *each)[1] for each in zip(prompts, [100] * 6, samplings, strict=True)]
            answers.append([tokens_of(items, 100) and items[:-1] for items in asked])
            until(lambda: all_pages_are_free(engine, pages))  # noqa: B023
        rows.append(sum(steps))
    assert answers[0] == answers[1]
    assert rows[0] > rows[1] == sum(map(len, prompts)) + 6 * 99  # some tokens were computed again


def test_prompts_that_begin_alike(sharing_model: Any, steps: list[int]) -> None:
    beginning, one, two = prompts_of([100, 9, 5])
    expected = [generated(sharing_model, beginning + end, 20) for end in (one, two, two)]
    with engine_of(sharing_model) as engine:

        def rows(*prompts: list[int]) -> int:
            steps.clear()
            asked = [ask(engine, prompt, 20)[1] for prompt in prompts]
            answers.extend(tokens_of(items, 20) for items in asked)
            return sum(steps)

        answers: list[list[int]] = []
        assert rows(beginning + one) == 109 + 19
        assert rows(beginning + two) == 105 - 96 + 19  # six pages of sixteen tokens were there
        assert rows(beginning + two) == 105 - 96 + 19
        assert answers == expected
        # What was generated is found again, too.
        longer = beginning + one + answers[0] + two
        expected.append(generated(sharing_model, longer, 20))
        assert rows(longer) == len(longer) - 128 // 16 * 16 + 19
        assert answers == expected
    with engine_of(sharing_model) as engine:
        # At the same time, even if the first has only begun to be read.
        answers = []
        assert rows(beginning + one, beginning + two, beginning + two) == 109 + 2 * (105 - 96) + 3 * 19
        assert answers == expected[:3]
        until(lambda: all_pages_are_free(engine, 256))


def test_the_pages_of_ends_are_taken_first(sharing_model: Any, steps: list[int]) -> None:
    old, new, other = prompts_of([64, 64, 64])
    with engine_of(sharing_model, pages=12) as engine:
        for prompt in (old, new, other):  # with its answer, each has a page more than its full ones; one is missing
            tokens_of(ask(engine, prompt, 2)[1], 2)
        for prompt in (old, new):
            steps.clear()
            tokens_of(ask(engine, prompt, 2)[1], 2)
            assert sum(steps) == 64 - 48 + 1


def test_streams_go_on_while_a_prompt_is_read(model: Any, steps: list[int]) -> None:
    short, long = prompts_of([4, 1500])
    with engine_of(model) as engine:
        job, stream = ask(engine, short, 2000)
        until(lambda: stream)
        counts: list[int] = []
        engine.add(Job(long, 1, frozenset(), Sampling(), lambda _: counts.append(len(stream))))
        before = len(stream)
        until(lambda: counts)
        assert counts[0] - before >= 1500 // 64 and not is_over(stream)
        engine.cancel(job)


def test_a_cancelled_job_gives_its_pages_back_and_nobody_spins(model: Any, steps: list[int]) -> None:
    read, unread = prompts_of([50, 2000])
    with engine_of(model, step_rows=16) as engine:
        jobs = [ask(engine, read, 2000), ask(engine, unread, 10)]
        until(lambda: len(jobs[0][1]) > 5)
        assert engine._schedules.groups[0].pool.available < 256
        for job, _ in jobs:
            engine.cancel(job)
        until(lambda: all_pages_are_free(engine, 256))
        assert not engine._unfinished
        computed, used = len(steps), time.process_time()
        time.sleep(0.3)
        assert len(steps) == computed and not any(is_over(items) for _, items in jobs)
        assert time.process_time() - used < 0.15
        assert tokens_of(ask(engine, read, 3)[1], 3)


def test_an_error_in_a_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    native = native_with_head(model)
    compute = native.step_rows
    broken = threading.Event()

    def fail(*arguments: Any) -> torch.Tensor:
        if broken.is_set():
            raise RuntimeError("a broken step")
        return compute(*arguments)

    monkeypatch.setattr(native, "step_rows", fail)
    [prompt] = prompts_of([40])
    with engine_of(model) as engine:
        expected = tokens_of(ask(engine, prompt, 5)[1], 5)
        broken.set()
        failed = [ask(engine, prompt, 5)[1] for _ in range(3)]
        until(lambda: all(map(is_over, failed)))
        assert all("could not compute" in items[-1].sentence for items in failed)
        until(lambda: all_pages_are_free(engine, 256))
        broken.clear()
        assert engine.problem is None and tokens_of(ask(engine, prompt, 5)[1], 5) == expected


def test_jobs_that_can_never_be_computed(model: Any) -> None:
    with engine_of(model, pages=8) as engine:
        _, items = ask(engine, [5] * 100, 29)
        sentence = "the prompt has 100 tokens and 29 for the answer; there is room for 128 in all"
        assert items == [Failure(sentence)]
        for token in (-1, 10**6):
            assert isinstance(ask(engine, [5, token], 2)[1][0], Failure)
        assert tokens_of(ask(engine, [5] * 100, 28)[1], 28)


def test_a_model_that_has_become_another_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(model) as engine:

        def refuse(*_: Any) -> None:
            raise UnsupportedDecoder("a layer was replaced")

        monkeypatch.setattr(native_with_head(model), "step_rows", refuse)
        _, items = ask(engine, [5], 2)
        until(lambda: is_over(items) and engine.problem is not None)
        assert "could not compute" in items[-1].sentence and "has ended" in engine.problem
        assert "no more requests are computed: the thread" in ask(engine, [5], 2)[1][0].sentence


def test_a_model_that_fails_at_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a broken step")

    native = native_with_head(model)
    monkeypatch.setattr(native, "step_rows", fail)
    engine = new_engine(model, native, 16, 16, 64)
    assert "could not compute" in (engine.start() or "")
    assert engine.stop()


def test_the_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_thread, "STOP_SECONDS", 0.1)
    native = native_with_head(model)
    compute = native.step_rows
    release = threading.Event()
    begun = threading.Event()

    def slow(*arguments: Any) -> torch.Tensor:
        begun.set()
        release.wait(SECONDS)
        return compute(*arguments)

    engine = new_engine(model, native, 16, 16, 64)
    assert engine.start() is None
    monkeypatch.setattr(native, "step_rows", slow)
    asked = [ask(engine, [5], 2)[1] for _ in range(3)]
    assert begun.wait(SECONDS)
    try:
        assert not engine.stop()  # a step that takes longer than anyone waits
        late = ask(engine, [5], 2)[1]
        assert all(len(items) == 1 and "ending" in items[0].sentence for items in [*asked, late])
        assert engine.problem is not None
    finally:
        release.set()
    until(lambda: not engine._thread.is_alive())
    assert engine.stop() and all(len(items) == 1 for items in asked)


def test_the_size_of_a_token(model: Any) -> None:
    native = native_with_head(model)
    layers = 1 if model.config.model_type == "qwen3_next" else 2
    assert native.token_bytes == layers * 2 * 16 * 2 * 4  # heads, depth, keys and values, fp32
    # channels and taps of the convolution; heads, depth of keys and of values
    states = ((2 * 2 + 4) * 16 * 4 + 4 * 16 * 16) * 4
    assert native.state_bytes == (states if layers == 1 else 0)


def test_states_are_of_their_sequence_alone(tmp_path: Path) -> None:
    """A line that another sequence has had begins with nothing, and what begins alike is computed again."""
    folder = write_tiny_model(tmp_path, "qwen3_next")
    model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)
    native = native_with_head(model)
    assert native is not None
    prompts = prompts_of([50, 50, 3, 70])
    prompts[1] = prompts[0]
    expected = [generated(model, prompt, 12) for prompt in prompts]
    engine = new_engine(model, native, 64, 16, 32, sequences=2)
    try:
        assert engine.start() is None
        for _ in range(2):
            answers = [ask(engine, prompt, 12)[1] for prompt in prompts]
            assert [tokens_of(items, 12) for items in answers] == expected
    finally:
        assert engine.stop()


def test_a_sequence_with_states_goes_on_where_one_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the next turn of a chat does. Where it begins otherwise, all of it is computed."""
    folder = write_tiny_model(tmp_path, "qwen3_next")
    model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)
    native = native_with_head(model)
    compute, steps = native.step_rows, []
    monkeypatch.setattr(native, "step_rows", lambda *a: steps.append(len(a[1])) or compute(*a))
    engine = new_engine(model, native, 64, 16, 64, sequences=2)
    try:
        assert engine.start() is None
        for length in (40, 48):  # the last page is full, or not, when 8 tokens more are computed
            (prompt,) = prompts_of([length])
            answer = tokens_of(ask(engine, prompt, 9)[1], 9)
            following = [*prompt, *answer, 7, 8]
            for turn, computed in ((following, 3), ([*following[:-1], 9], length + 11)):
                expected = generated(model, turn, 5)
                steps.clear()
                job, items = ask(engine, turn, 5)
                assert tokens_of(items, 5) == expected and sum(steps) == computed + 4
                assert job.cached_tokens == len(turn) - computed
    finally:
        assert engine.stop()


@given(st.integers(2, 5), st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_slots_have_the_states_of_what_goes_on_in_them(pages: int, slots: int, data: st.DataObject) -> None:
    """A slot remembers the tokens of its states, and pages those of their places."""
    size = 4
    schedule = Schedule(pages, size, 7, slots, shares_pages=False)
    states: dict[int, list[int]] = {}
    memory = [[()] * size for _ in range(pages)]
    text = [data.draw(st.integers(0, 1)) for _ in range(pages * size)]
    for _ in range(40):
        if len(schedule.sequences) < 3:
            length = data.draw(st.integers(1, len(text) - 1))
            prompt = [*text[: length - 1], data.draw(st.integers(0, 1))]
            schedule.add(Job(prompt, 1000, frozenset(), Sampling(), lambda _: None))
        pieces = schedule.next_step(7)
        for piece in pieces:
            sequence, first = piece.sequence, piece.sequence.computed
            assert first == 0 or states[sequence.line] == sequence.tokens[:first]
            for place in range(first + piece.count):
                if place >= first:
                    memory[sequence.pages[place // size]][place % size] = tuple(sequence.tokens[: place + 1])
                assert memory[sequence.pages[place // size]][place % size] == tuple(sequence.tokens[: place + 1])
            states[sequence.line] = sequence.tokens[: first + piece.count]
        schedule.advance(pieces)
        for sequence in [piece.sequence for piece in pieces if piece.is_last or not piece.sequence.pending]:
            sequence.tokens.append(text[len(sequence.tokens)] if len(sequence.tokens) < len(text) else 0)
            sequence.job.over = len(sequence.tokens) >= len(text) or data.draw(st.booleans())
        schedule.drop_ended()
