"""The parts under the server: choosing tokens, text piece by piece, engines, and what a slow or absent client meets."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import resource
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_architecture import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("starlette")

import transformers
from pydantic import ValidationError

import cpumoe
from cpumoe.errors import RankError
from cpumoe.generation import admission, connections
from cpumoe.generation import http as limits
from cpumoe.generation.answers import Answering, Choice
from cpumoe.generation.api_requests import ApiError, ChatRequest, CompletionRequest, parse_body
from cpumoe.generation.batch_engine import BatchEngine, CannotBatch
from cpumoe.generation.engine import SequentialEngine, start_engine
from cpumoe.generation.server import Server
from cpumoe.generation.stop_strings import StopAutomaton, StopStrings
from cpumoe.generation.text import PlainMessage, StructuredMessage, TextPieces
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.request import Failure, Job
from cpumoe.steps.runner import CoreRunner
from cpumoe.steps.sampling import Sampling, Token, TokenChooser
from cpumoe.steps.schedule import MOST_SEQUENCES

SECONDS = 60.0  # at most, for things that take milliseconds
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

# ---- choosing tokens -------------------------------------------------------------------------------------------------


def choices(sampling: Sampling, scores: torch.Tensor, count: int = 300) -> Counter[int]:
    chooser = TokenChooser(sampling, [])
    return Counter(chooser.choose(scores).id for _ in range(count))


@given(st.integers(0, 2**32), st.integers(1, 12), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.floats(0.1, 2.0))
@settings(max_examples=60, deadline=None)
def test_only_tokens_that_transformers_would_allow(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Each rule alone keeps what transformers' own keeps, up to ties of rounding at the border."""
    scores = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = {
        "top_k": (top_k, transformers.TopKLogitsWarper(top_k)),
        "top_p": (top_p, transformers.TopPLogitsWarper(top_p)),
        "min_p": (min_p, transformers.MinPLogitsWarper(min_p)),
    }
    for name, (value, warper) in warpers.items():
        sampling = Sampling(temperature=temperature, **{name: value}, seed=1)
        kept = warper(torch.zeros((1, 0), dtype=torch.int64), scores[None] / temperature)[0].isfinite()
        seen = choices(sampling, scores, 60)
        probabilities = (scores / temperature).softmax(-1)
        border = float(probabilities[kept].min()) * (1 - 1e-5)
        assert all(probabilities[token] >= border for token in seen), name


@pytest.mark.parametrize("seed", range(8))
def test_rules_apply_in_the_order_of_transformers(seed: int) -> None:
    """The repetition penalty, then temperature, top_k, top_p and min_p, each on what the one before has left."""
    random = torch.Generator().manual_seed(seed)
    scores, prompt = torch.randn(24, generator=random) * 2, torch.randint(24, (6,), generator=random).tolist()
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.85, min_p=0.06, repetition_penalty=1.4, seed=seed)
    ids, left = torch.tensor([prompt]), scores[None].clone()
    for processor in (
        transformers.RepetitionPenaltyLogitsProcessor(1.4),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.85),
        transformers.MinPLogitsWarper(0.06),
    ):
        left = processor(ids, left)
    chances = left[0].softmax(-1)
    seen: Counter[int] = Counter()
    for number in range(1500):
        seen[TokenChooser(replace(sampling, seed=number), prompt).choose(scores).id] += 1
    assert set(seen) <= set(chances.nonzero().flatten().tolist())
    for token, chance in enumerate(chances.tolist()):
        assert abs(seen[token] / 1500 - chance) < 0.06


def test_probabilities() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    seen = choices(Sampling(temperature=1.0, seed=0), scores, 4000)
    for token, share in enumerate(scores.softmax(-1).tolist()):
        assert abs(seen[token] / 4000 - share) < 0.03
    assert choices(Sampling(), scores) == {2: 300} == choices(Sampling(temperature=1e-9), scores)


def test_penalties_and_biases() -> None:
    scores = torch.tensor([1.0, 0.9, -1.0, -1.1])
    chooser = TokenChooser(Sampling(presence_penalty=0.2), [0])
    assert [chooser.choose(scores).id for _ in range(3)] == [0, 1, 0]
    chooser = TokenChooser(Sampling(frequency_penalty=0.15), [0])
    assert [chooser.choose(scores).id for _ in range(4)] == [0, 1, 0, 1]
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.5)
    theirs = int(penalty(torch.tensor([[0, 2]]), scores[None].clone())[0].argmax())
    assert TokenChooser(Sampling(repetition_penalty=1.5), [0, 2]).choose(scores).id == theirs == 1
    assert TokenChooser(Sampling(logit_bias={3: 100.0}), []).choose(scores).id == 3


def test_probabilities_are_those_of_the_model() -> None:
    scores = torch.tensor([1.0, 0.9, -1.0])
    token = TokenChooser(Sampling(logit_bias={2: 100.0}, logprobs=2), []).choose(scores)
    logprobs = scores.log_softmax(-1)
    assert token.id == 2 and token.logprob == pytest.approx(float(logprobs[2]))
    assert [pair[0] for pair in token.likeliest] == [0, 1]
    assert token.likeliest[0][1] == pytest.approx(float(logprobs[0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite numbers"):
        TokenChooser(Sampling(), []).choose(torch.tensor([0.0, bad]))


def test_settings_at_the_edge() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    assert choices(Sampling(temperature=1.0, top_p=1e-50), scores, 20) == {2: 20}
    items: list[Any] = []
    job = Job([5], 3, frozenset(), Sampling(logit_bias={10**6: 1.0}), items.append)  # beyond the scores
    assert job.next_token(scores) is None and isinstance(items[-1], Failure)  # this job fails, and no other


def test_settings_of_the_model() -> None:
    config = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert Sampling.of_model(config) == Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    # Without do_sample they have no effect in transformers either.
    assert Sampling.of_model(transformers.GenerationConfig(temperature=0.6)) == Sampling()


# ---- text ------------------------------------------------------------------------------------------------------------


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_stop_strings_wherever_the_pieces_end(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    finder = StopStrings(StopAutomaton(stops))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = ""
    for piece in pieces:
        shown += finder.add(piece)
        if finder.found:
            break
        assert not any(stop in shown for stop in stops)  # nothing was shown that had to be taken back
    shown += finder.rest()
    if finder.found:
        # The string that was complete first, which may differ from the one that begins first.
        assert any(text.startswith(shown + stop) for stop in stops)
    else:
        assert shown == text and not any(stop in text for stop in stops)


def executed_lines(function: Callable[[], object]) -> int:
    """A measure of work that does not depend on the machine: the lines of Python that a call executes."""
    lines = 0

    def trace(*_: object) -> Any:
        nonlocal lines
        lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


LONGEST = 1024
HARD_STOPS = {
    "one beginning in all": ["a" * LONGEST] + ["ab" + "a" * (LONGEST - 2)] * 15,
    "ends that are beginnings of others": ["a" * n + "b" for n in range(LONGEST - 16, LONGEST)],
    "no common beginning": [chr(0x4E00 + n) + "a" * (LONGEST - 1) for n in range(16)],
}


@pytest.mark.parametrize("stops", HARD_STOPS.values(), ids=HARD_STOPS)
def test_stop_strings_take_linear_time(stops: list[str]) -> None:
    """For the automaton and for the text, one character a token, that nearly is a stop string all the time."""
    automaton = StopAutomaton(stops)
    text = ("a" * (LONGEST - 1) + "c" + "ab" + "a" * (LONGEST - 3) + "c") * 2
    finder = StopStrings(automaton)
    shown: list[str] = []
    assert executed_lines(lambda: shown.extend(map(finder.add, text))) < 60 * len(text)
    assert "".join(shown) + finder.rest() == text and not finder.found
    assert executed_lines(lambda: StopAutomaton(stops)) < 60 * sum(map(len, stops))


QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}


def read(prompt: str, *pieces: str, tools: bool = True) -> tuple[str, str, list[tuple[str, Any]]]:
    message = StructuredMessage(QWEN, prompt, [{"type": "function", "function": {"name": "add"}}] if tools else [])
    deltas = [*(message.add(piece) for piece in pieces), message.rest()]
    calls = [(call.name, json.loads(call.arguments)) for delta in deltas for call in delta.tool_calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def test_parts_of_a_message() -> None:
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert read(asked, "Hel", "lo") == ("Hello", "", [])
    content, reasoning, _ = read(asked, "<thi", "nk>so", " so</th", "ink>well")
    assert (content.strip(), reasoning) == ("well", "so so")
    assert read(asked + "<think>", "so</think>", "well")[1] == "so"  # opened by the template
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(asked, call[:20], call[20:])[2] == [("add", {"a": 1})]
    # The prompt is no part of the answer where the template has other marks.
    assert read("Q: hi\nA:", "Hello") == ("Hello", "", [])
    # White space that the template puts behind a mark is no part of the answer.
    assert read(asked + "<think>\n\n</think>\n\n", "Hello") == ("Hello", "", [])
    # What does not keep to the format is given as it is, and nothing of it is lost.
    for bad in ("{not json}", '{"name": 5, "arguments": {}}', '{"arguments": {}}', '"add"', "[1]", "[" * 100_000):
        content, _, calls = read(asked, "Sure. <tool", f"_call>{bad}</tool", "_call> and more")
        assert not calls and content.split() == ["Sure.", *f"<tool_call>{bad}</tool_call> and more".split()]
    content, _, calls = read(asked, 'Sure. <tool_call>{"name": "f", ')  # cut
    assert not calls and content.split() == ["Sure.", '<tool_call>{"name":', '"f",']
    assert read(asked, '<tool_call>{"name": "f"}</tool_call>')[2] == [("f", {})]
    # Without tools a call is a text like any other.
    assert read(asked, call, tools=False) == (call, "", [])


def test_a_mistake_of_our_own_is_not_blamed_on_the_model_that_wrote_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistaken(*_: Any) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(StructuredMessage, "_delta", mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        read("<|im_start|>assistant\n", "Hello")


def test_pieces_join_to_the_text(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Experts: \N{GREEK SMALL LETTER ALPHA}\N{GRINNING FACE} " * 40
    pieces = TextPieces(tokenizer)
    assert "".join(pieces.add([token]) for token in tokenizer.encode(text)) + pieces.rest() == text


def test_bytes_that_never_become_characters(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    lone = tokenizer.encode("\N{GRINNING FACE}")[0]  # the first byte of several
    pieces, lengths = TextPieces(tokenizer), []
    text = ""
    for _ in range(2000):
        text += pieces.add([lone])
        lengths.append(len(pieces._tokens))
    assert max(lengths) <= 256 and set(text + pieces.rest()) == {"\N{REPLACEMENT CHARACTER}"}


# ---- engines and connections -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sequential", "steps"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model and its tokenizer; packed, its steps are one call of the core."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    if request.param == "steps":
        model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def engine_for(model: Any) -> SequentialEngine | StepEngine:
    native = native_with_head(model)
    if native is None:
        return SequentialEngine(model)
    engine = StepEngine(CoreRunner(PagedDecoder(model, native), 4096, 32, MOST_SEQUENCES), 4096, 32, step_rows=64)
    assert engine.start() is None
    return engine


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_answers_as_generate_does(parts: tuple[Any, Any]) -> None:
    model, _ = parts
    prompt = [5, 6, 7]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    engine = engine_for(model)
    items: list[Any] = []
    engine.add(Job(prompt, 12, frozenset({3}), Sampling(), items.append))
    until(lambda: items and not isinstance(items[-1], Token))
    assert [item.id for item in items[:-1]] == expected and items[-1] == "length"
    assert engine.stop()
    late: list[Any] = []
    engine.add(Job(prompt, 1, frozenset(), Sampling(), late.append))
    assert isinstance(late[0], Failure) and "ending" in late[0].sentence


def test_a_cancelled_job_makes_room(parts: tuple[Any, Any]) -> None:
    engine = engine_for(parts[0])
    items: list[Any] = []
    long = Job([5], 100_000, frozenset(), Sampling(), items.append)
    engine.add(long)
    until(lambda: items)
    engine.cancel(long)
    after: list[Any] = []
    engine.add(Job([5], 2, frozenset(), Sampling(), after.append))
    until(lambda: after and after[-1] == "length")
    assert all(isinstance(item, Token) for item in items) and len(items) < 100_000
    assert engine.stop()


def test_a_job_that_fails_does_not_end_the_others(parts: tuple[Any, Any]) -> None:
    engine = engine_for(parts[0])
    bad: list[Any] = []
    engine.add(Job([10**6], 2, frozenset(), Sampling(), bad.append))  # beyond the vocabulary
    good: list[Any] = []
    engine.add(Job([5], 2, frozenset(), Sampling(), good.append))
    until(lambda: good and good[-1] == "length")
    assert isinstance(bad[-1], Failure) and "could not compute" in bad[-1].sentence
    assert engine.stop()


def test_a_model_that_cannot_be_batched_and_a_mistake_of_our_own(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such attention")

    monkeypatch.setattr(parts[0], "init_continuous_batching", refuse)
    with pytest.raises(CannotBatch, match="no such attention"):
        BatchEngine(parts[0], 16, 32, 64)
    monkeypatch.setattr(parts[0], "init_continuous_batching", lambda **_: None)  # our code cannot use this
    with pytest.raises(AttributeError, match="logit_processor"):
        BatchEngine(parts[0], 16, 32, 64)


@contextmanager
def stopping(engine: SequentialEngine | StepEngine) -> Iterator[SequentialEngine | StepEngine]:
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def serving(
    parts: tuple[Any, Any], max_connections: int = 100, send_buffer: int | None = None
) -> Iterator[tuple[Server, int]]:
    """The server inside this process, on a thread of its own; ``send_buffer`` is the kernel's for each connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        stopping(engine_for(parts[0])) as engine,
        Server(*parts, "tiny", 2048, engine) as served,
    ):
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        ready = threading.Event()
        uvicorn_server = served._uvicorn(max_connections, "warning", ready.set)
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(SECONDS)
            yield served, listener.getsockname()[1]
        finally:
            uvicorn_server.should_exit = True
            thread.join(SECONDS)


def post(connection: socket.socket, path: str, body: dict[str, Any], headers: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
    connection.sendall(head.encode() + data)


def answer_on(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON of the next response."""
    connection.settimeout(SECONDS)
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_computed_for(parts: tuple[Any, Any], stream: bool) -> None:
    with serving(parts) as (served, port):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            body = {"model": "tiny", "prompt": "The", "max_tokens": 2000, "stream": stream}
            post(connection, "/v1/completions", body)
            until(lambda: served._admission._answers == 1)
        until(lambda: served._admission._answers == 0)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            post(connection, "/v1/completions", {"model": "tiny", "prompt": "The", "max_tokens": 1})
            assert answer_on(connection)[0] == 200


def test_too_many_answers_at_once(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_ANSWERS", 2)
    with serving(parts) as (_, port), socket.create_connection(("127.0.0.1", port)) as connection:
        post(connection, "/v1/completions", {"model": "tiny", "prompt": "The", "n": 3})
        response = http.client.HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())["error"]
        assert response.status == 429 and "ask again later" in error["message"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) > 0


def test_all_answers_share_stop_strings_that_the_event_loop_did_not_prepare(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, str]] = []

    class Watched(StopAutomaton):
        def __init__(self, stops: Any) -> None:
            built.append((len(stops), threading.current_thread().name))
            super().__init__(stops)

    monkeypatch.setattr(admission, "StopAutomaton", Watched)
    message = {"messages": [{"role": "user", "content": "hi"}]}
    with serving(parts) as (_, port):
        built.clear()  # that of the model
        for path, prompt in (("/v1/completions", {"prompt": "The"}), ("/v1/chat/completions", message)):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                body = {"model": "tiny", "n": 4, "max_tokens": 2, "stop": HARD_STOPS["one beginning in all"], **prompt}
                post(connection, path, body)
                status, answer = answer_on(connection)
                assert status == 200 and len(answer["choices"]) == 4
    assert [count for count, _ in built] == [16, 16]
    assert all(name.startswith("cpumoe-prompts") for _, name in built)


def test_other_connections_have_their_turn_while_many_tokens_wait(parts: tuple[Any, Any]) -> None:
    class Ready:
        """All tokens of a job are there at once."""

        problem = None

        def add(self, job: Job) -> None:
            for token in range(500):
                job._deliver(Token(token % 40 + 10))
            job._deliver("length")

        def cancel(self, job: Job) -> None: ...

        def stop(self) -> bool:
            return True

    async def answer() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(other())
        choice = Choice(0, parts[1], StopAutomaton([]), PlainMessage(), frozenset())
        options: dict[str, Any] = {"n": 1, "on_end": lambda: None}
        answering = Answering(Ready(), [choice], [[5]], [500], frozenset(), [Sampling()], **options)
        await answering.finished()
        waiting.cancel()
        assert len(choice.tokens) == 500
        return turns

    assert asyncio.run(answer()) > 20


def test_waiting_jobs_are_told_that_the_engine_ends() -> None:
    begun, release = threading.Event(), threading.Event()

    class Slow:
        def generate(self, *_: Any, **__: Any) -> None:
            begun.set()
            release.wait(SECONDS)

    engine = SequentialEngine(Slow())
    items: list[Any] = []
    for _ in range(3):
        engine.add(Job([5], 2, frozenset(), Sampling(), items.append))
    assert begun.wait(SECONDS)
    try:
        assert not engine.stop()  # a step that takes longer than anyone waits
        assert [type(item) for item in items] == [Failure] * 3
    finally:
        release.set()


def test_limits_of_the_generation_config_do_not_end_an_answer_early() -> None:
    model = tiny_model("jamba")  # without a native decoder
    model.generation_config.max_time = 0.0
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with stopping(SequentialEngine(model)) as engine:
        engine.add(Job([5, 6], 3, frozenset(), Sampling(), items.put))
        assert [type(items.get(timeout=SECONDS)) for _ in range(4)] == [Token] * 3 + [str]


def test_a_request_that_transformers_ends_early_fails() -> None:
    class Short:
        def generate(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(past_key_values=None, sequences=torch.tensor([[5]]))

    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with stopping(SequentialEngine(Short())) as engine:
        engine.add(Job([5], 2, frozenset(), Sampling(), items.put))
        assert "ended it early" in items.get(timeout=SECONDS).sentence


def test_a_rank_that_is_lost_ends_the_engine() -> None:
    class Spread:
        def generate(self, *_: Any, **__: Any) -> None:
            raise RankError("rank 1 has ended")

    engine = SequentialEngine(Spread())
    items: list[Any] = []
    engine.add(Job([5], 2, frozenset(), Sampling(), items.append))
    until(lambda: items)
    assert "could not compute" in items[0].sentence and "rank 1 has ended" in str(engine.lost)
    assert engine.problem is not None and engine.stop()


MANY_TOKENS = {"model": "tiny", "prompt": "The", "n": 64, "max_tokens": 20, "logprobs": 20}  # answered by a megabyte


@contextmanager
def reading_little(port: int) -> Iterator[socket.socket]:
    """Yield a connection with small buffers on this side too; serve with ``send_buffer``."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        yield connection


@pytest.mark.parametrize("way", ["stream", "whole", "pipelined", "closing"])
def test_clients_that_do_not_read_lose_their_connections(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Their places are free for others again, and nothing is computed for them any more."""
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.5)
    with serving(parts, max_connections=1, send_buffer=4096) as (served, port), reading_little(port) as connection:
        if way == "pipelined":
            connection.settimeout(0.3)
            with pytest.raises((TimeoutError, ConnectionError)):  # up to where neither side takes more
                while True:
                    connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        else:
            # Before "closing" comes less than asyncio lets wait by default.
            body = {**MANY_TOKENS, "stream": way == "stream", "n": 4 if way == "closing" else 64}
            post(connection, "/v1/completions", body, "connection: close\r\n" if way == "closing" else "")
            assert select.select([connection], [], [], SECONDS)[0]  # the answer begins
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(HEALTH)
            assert answer_on(other) == (200, {"status": "ok"})
        until(lambda: served._admission._answers == 0)


def test_a_client_that_reads_slowly_has_its_whole_answer(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes, as long as it takes something."""
    monkeypatch.setattr(limits, "SEND_SECONDS", 1.0)
    with serving(parts, send_buffer=4096) as (_, port), reading_little(port) as connection:
        post(connection, "/v1/completions", MANY_TOKENS)
        connection.settimeout(SECONDS)
        response = http.client.HTTPResponse(connection)
        response.begin()
        started, data = time.monotonic(), b""
        while part := response.read(32 << 10):
            data += part
            time.sleep(0.1)
        assert time.monotonic() - started > 1.5
        assert len(json.loads(data)["choices"]) == 64


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_long_wrong_list_ends_at_its_first_wrong_entry(kind: Any) -> None:
    """A million errors would take seconds, and the connections wait meanwhile."""
    field = "messages" if kind is ChatRequest else "prompt"
    for entries in ([0.5] * 1000, [{}] * 1000, [{"role": "user", "content": [{}] * 1000}] * 2):
        with pytest.raises(ValidationError) as refusal:
            kind.model_validate({"model": "tiny", field: entries})
        assert refusal.value.error_count() <= 8  # a few alternatives
        with pytest.raises(ApiError) as told:
            parse_body(kind, json.dumps({"model": "tiny", field: entries}).encode())
        assert len(str(told.value)) < 300


def test_requests_that_are_never_finished(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with serving(parts) as (_, port):
        for beginning in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
                connection.sendall(beginning)
                assert connection.recv(100) == b""  # closed by the server
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            # A byte now and then does not help.
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                for _ in range(1000):
                    connection.sendall(b"a")
                    time.sleep(0.02)
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            assert answer_on(connection)[0] == 408
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            for _ in range(2):  # a connection is used again, however long it was idle
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert answer_on(connection) == (200, {"status": "ok"})
                time.sleep(0.5)


def test_connections_above_the_limit_wait(parts: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    with serving(parts, max_connections=3) as (_, port), ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(6)]
        for number in (4, 0, 1, 2):
            connections[number].sendall(HEALTH)
        for number in (0, 1, 2):
            assert answer_on(connections[number]) == (200, {"status": "ok"})
        assert not select.select([connections[4]], [], [], 0)[0]
        for number in (0, 2):  # the fourth is idle, so that there is a place for the fifth
            connections[number].close()
        assert answer_on(connections[4]) == (200, {"status": "ok"})
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "3 connections are open: more of them wait until some close (--max-connections, and ulimit -n, set this limit)"
    ]


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    """Lowers this process's limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_more_connections_than_files() -> None:
    used = len(list(Path("/proc/self/fd").iterdir()))
    with open_files(used + 100):
        assert 0 < connections.connection_limit() < 100
        assert connections.connection_limit(5) == 5
        with pytest.raises(ValueError, match=rf"500 connections.* limit of {used + 100} open files: ulimit -n"):
            connections.connection_limit(500)
    with open_files(used + 20), pytest.raises(ValueError, match="1 connections, and .*ulimit -n .* raises it$"):
        connections.connection_limit()
    assert connections.connection_limit() <= 1024


def test_a_process_without_files_logs_one_line_and_accepts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.01)

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"here")

    async def serve() -> None:
        with connections.listen("127.0.0.1", 0) as listener, ExitStack() as opened:
            clients = [opened.enter_context(socket.create_connection(listener.getsockname())) for _ in range(3)]
            with open_files(3):  # fewer than are open
                acceptor = connections.Acceptor(listener, 100, lambda on_lost: Echo())
                await asyncio.sleep(0.1)  # ten times
                assert not select.select(clients, [], [], 0)[0]
            try:
                for client in clients:
                    client.setblocking(False)
                    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), SECONDS) == b"here"
            finally:
                acceptor.close()

    asyncio.run(serve())
    told = [record.getMessage() for record in caplog.records]
    assert told == ["no connection can be accepted: Too many open files; those that are open are served"]


def test_connections_whose_protocol_fails_leave_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Echo(asyncio.Protocol):
        def __init__(self, on_lost: Callable[[], None]) -> None:
            made.append(self)
            if len(made) <= 2:
                raise RuntimeError("no protocol")

        def connection_made(self, transport: Any) -> None:
            transport.write(b"here")

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with connections.listen("127.0.0.1", 0) as listener, ExitStack() as opened:
            acceptor = connections.Acceptor(listener, 2, Echo)
            try:
                for expected in (b"", b"", b"here"):
                    client = opened.enter_context(socket.create_connection(listener.getsockname()))
                    client.setblocking(False)
                    found = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), SECONDS)
                    assert found == expected
            finally:
                acceptor.close()

    asyncio.run(serve())


def test_a_slow_template_does_not_stop_the_others(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: Any) -> list[int]:
        release.wait(SECONDS)
        return [5]

    with serving(parts) as (served, port):
        monkeypatch.setattr(served._endpoints._prompts, "of_chat", slow)
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            post(waiting, "/v1/chat/completions", body)
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert answer_on(connection) == (200, {"status": "ok"})
            release.set()
            assert answer_on(waiting)[0] == 200


def test_tokens_after_the_end_of_the_loop() -> None:
    class Engine:
        def add(self, job: Job) -> None:
            jobs.append(job)

    async def begin() -> None:
        choice = Choice(0, None, StopAutomaton([]), PlainMessage(), frozenset())
        Answering(Engine(), [choice], [[5]], [1], frozenset(), [Sampling()], n=1, on_end=lambda: None)

    jobs: list[Job] = []
    asyncio.run(begin())
    jobs[0].fail("too late")  # nobody is there, and that is all


# ---- engines without a native decoder --------------------------------------------------------------------------------


def answered(engine: Any, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt's were in the KV cache."""
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = Job(prompt, count, frozenset({10**6}), Sampling(), items.put)
    engine.add(job)
    tokens = []
    while isinstance(item := items.get(timeout=SECONDS), Token):
        tokens.append(item.id)
    assert item == "length", item
    return tokens, job.cached_tokens


@pytest.mark.parametrize(
    ("name", "dtype", "continues"),
    [
        ("qwen3_next", torch.float32, True),
        ("gpt_oss", torch.float32, True),
        ("jamba", torch.float32, False),
        ("minimax", torch.float32, False),
        ("nemotron_h", torch.float32, True),  # some of its layers have no states
        ("mixtral", torch.bfloat16, True),  # one call or two: rounding chooses other experts
        ("qwen3_next", torch.bfloat16, True),
    ],
)
def test_the_next_turn_is_answered_as_if_it_were_the_first(name: str, dtype: torch.dtype, continues: bool) -> None:
    """transformers' Jamba begins with empty states in each call of several tokens, MiniMax's cache counts wrongly."""
    model = tiny_model(name, dtype=dtype)
    model.generation_config.eos_token_id = None
    first = torch.randint(4, 90, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with stopping(SequentialEngine(model)) as engine:
        second = [*first, *answered(engine, first, 12)[0], 7, 8, 9]
        found, cached = answered(engine, second, 12)
    with stopping(SequentialEngine(model)) as engine:
        assert answered(engine, second, 12) == (found, 0) or dtype != torch.float32
    assert (cached == len(first) + 11) == continues and (cached == 0) != continues


def test_a_cache_that_the_generation_config_names() -> None:
    model = tiny_model("qwen3_moe")
    model.generation_config.update(cache_implementation="dynamic", eos_token_id=None)
    with stopping(SequentialEngine(model)) as engine:
        assert answered(engine, [5, 6, 7], 4)[0] == answered(engine, [5, 6, 7], 4)[0]


def test_a_model_that_cannot_be_batched_is_answered_one_at_a_time() -> None:
    """transformers had given it a paged attention by then, with which it cannot run alone."""
    model = cpumoe.accelerate(tiny_model("deepseek_v4"), "w4a8-g32")
    model.generation_config.eos_token_id = None
    attention = model.config._attn_implementation
    with start_engine(model, 10**9) as started:
        assert isinstance(started.engine, SequentialEngine) and model.config._attn_implementation == attention
        assert len(answered(started.engine, [5, 6, 7], 4)[0]) == 4


def test_heads_that_differ_from_layer_to_layer_cannot_be_batched() -> None:
    with start_engine(tiny_model("gemma4"), 10**9) as started:
        assert isinstance(started.engine, SequentialEngine) and "num_key_value_heads" in started.way


def test_rules_that_the_native_decoder_leaves_out_are_named(
    parts: tuple[Any, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_with_head(parts[0]) is None:
        pytest.skip("without the native decoder transformers computes them")
    rules = {"no_repeat_ngram_size": 1, "min_new_tokens": 1, "forced_eos_token_id": 0}
    harmless = {"typical_p": 1.0, "min_length": 0, "bad_words_ids": [], "encoder_repetition_penalty": 1.0}
    for name, value in (rules | harmless).items():
        monkeypatch.setattr(parts[0].generation_config, name, value, raising=False)
    with start_engine(parts[0], 10**9, one_request=True):
        pass
    (told,) = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    assert all(name in told for name in rules) and not any(name in told for name in harmless)
