"""Answers as clients and ``cpumoe chat`` read them: reasoning, ends of turns, usage, log probabilities, history."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("starlette")

import transformers
from served_models import Server, serve

from cpumoe.cli import main
from cpumoe.cli.chat import Conversation
from cpumoe.cli.chat import _turn as take_turn
from cpumoe.generation import token_text
from cpumoe.generation.answer_marks import _HARMONY as HARMONY_MARKS
from cpumoe.generation.answer_marks import AnswerMarks
from cpumoe.generation.answers import Answering, ChatFormat, CompletionFormat
from cpumoe.generation.api_requests import ResponsesRequest
from cpumoe.generation.batch_engine import BatchEngine
from cpumoe.generation.choice import Choice
from cpumoe.generation.responses_format import ResponsesFormat
from cpumoe.generation.session import Session
from cpumoe.generation.stop_strings import StopAutomaton
from cpumoe.generation.text import PlainMessage, StructuredMessage
from cpumoe.generation.token_text import TokenTexts
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.steps.request import Finish, Job
from cpumoe.steps.sampling import Sampling, Token, TokenChooser
from cpumoe.steps.schedule import Schedule

ASKED = [{"role": "user", "content": "Which experts?"}]

# The template of a model that always reasons first. It keeps the reasoning of earlier answers.
REASONING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
# That of gpt-oss, as far as it matters here.
HARMONY = (
    "{% for message in messages %}<|start|>{{ message['role'] }}"
    "{% if message['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reasons. Only its template says that turns end with ``<|im_end|>``."""
    folder = write_tiny_model(tmp_path_factory.mktemp("reasoning"))
    (folder / "chat_template.jinja").write_text(REASONING)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": 1}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(str(folder), "--scheme", "w4a8-g32", "--name", "tiny") as server:
        yield server


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model and a tokenizer with the special tokens and the template of gpt-oss."""
    folder = write_tiny_model(tmp_path_factory.mktemp("harmony"))
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY_TOKENS})
    tokenizer.chat_template = HARMONY
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def read(tokenizer: Any, marks: AnswerMarks, text: str, tools: Any = (), finish: Finish = "stop") -> Choice:
    """What is read in an answer of this text."""
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    choice = Choice(0, tokenizer, StopAutomaton(()), marks.message(prompt, tools), marks.ends)
    for token in tokenizer.encode(text, add_special_tokens=False):
        choice.add(Token(token))
    choice.end(finish)
    return choice


# ---- /v1/responses ---------------------------------------------------------------------------------------------------


def test_reasoning_can_be_sent_back(server: Server) -> None:
    with server.client() as client:
        first = client.responses.create(model="tiny", input=ASKED, max_output_tokens=20, temperature=0)
        assert [item.type for item in first.output] == ["reasoning"]
        assert first.usage.output_tokens_details.reasoning_tokens == 20
        said = first.output[0].content[0].text
        history = [*ASKED, *first.output, {"role": "user", "content": "And now?"}]
        second = client.responses.create(model="tiny", input=history, max_output_tokens=2, temperature=0)
        chat = client.chat.completions.create(
            model="tiny",
            messages=[*ASKED, {"role": "assistant", "content": "", "reasoning_content": said}, history[-1]],
            max_tokens=2,
            temperature=0,
        )
        cut = {"role": "assistant", "content": None, "reasoning_content": said}  # an answer that is reasoning alone
        same = client.chat.completions.create(model="tiny", messages=[*ASKED, cut, history[-1]], max_tokens=1)
        assert second.usage.input_tokens == chat.usage.prompt_tokens == same.usage.prompt_tokens
        assert second.output[0].content[0].text == chat.choices[0].message.reasoning_content
        assert chat.usage.prompt_tokens_details.cached_tokens == (second.usage.input_tokens - 1) // 32 * 32 > 0


def test_reasoning_belongs_to_the_message_after_it(server: Server) -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "So."}],
    }
    message = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    message["content"] = [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}]
    end = {"role": "user", "content": "And now?"}
    with server.client() as client:
        ours = client.responses.create(model="tiny", input=[*ASKED, reasoning, message, end], max_output_tokens=1)
        together = {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
        chat = client.chat.completions.create(model="tiny", messages=[*ASKED, together, end], max_tokens=1)
    assert ours.usage.input_tokens == chat.usage.prompt_tokens


def test_streamed_and_whole_responses_are_the_same(server: Server) -> None:
    """Cut in the reasoning, there is no message, and what was cut is not called complete."""

    def shape(response: Any) -> Any:
        items = [(i.type, i.status, [(part.type, part.text) for part in i.content]) for i in response.output]
        return items, response.status, response.incomplete_details, response.usage.output_tokens

    asked: dict[str, Any] = {"model": "tiny", "input": "Which?", "temperature": 0, "max_output_tokens": 12}
    with server.client() as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
    assert shape(events[-1].response) == shape(whole)
    assert whole.status == whole.output[-1].status == "incomplete"
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    assert done == [item.status for item in whole.output]


class Scripted:
    """An engine whose answers are given."""

    def __init__(self, tokens: list[int], finish: Finish) -> None:
        self._items = [*map(Token, tokens), finish]

    def add(self, job: Job) -> None:
        for item in self._items:
            job._deliver(item)


@pytest.mark.parametrize(
    ("text", "finish", "items"),
    [
        ("So.</think>Yes.", "stop", [("reasoning", "So."), ("message", "Yes.")]),
        (
            "A</think>B<think>C</think>D",
            "length",
            [("reasoning", "A"), ("message", "B"), ("reasoning", "C"), ("message", "D")],
        ),
        ("So.</think>", "length", [("reasoning", "So.")]),
        ("</think>", "stop", [("message", "")]),
    ],
)
def test_items_are_what_was_written(
    folder: Path, model: Any, text: str, finish: Finish, items: list[tuple[str, str]]
) -> None:
    tokenizer = load_tokenizer(folder)
    marks = AnswerMarks(model, tokenizer)
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)

    async def answer() -> tuple[dict[str, Any], dict[str, Any]]:
        def answering() -> Answering:
            choice = Choice(0, tokenizer, StopAutomaton(()), marks.message(prompt), marks.ends)
            engine = Scripted(tokenizer.encode(text), finish)
            return Answering(engine, [choice], [prompt], [99], marks.ends, [Sampling()], n=1, on_end=lambda: None)

        body = ResponsesRequest(model="tiny", input="Which experts?")
        first, second = answering(), answering()
        await first.finished()
        events = [event async for event in ResponsesFormat(body).events(second)]
        return ResponsesFormat(body).whole(first), events[-1]["response"]

    whole, streamed = asyncio.run(answer())
    for found in (whole, streamed):
        assert [(item["type"], item["content"][0]["text"]) for item in found["output"]] == items
        last = "completed" if finish == "stop" else "incomplete"
        assert [item["status"] for item in found["output"]] == ["completed"] * (len(items) - 1) + [last]
        assert found["status"] == last
    assert whole["usage"] == streamed["usage"]


def test_unknown_items_are_named(server: Server) -> None:
    status, reply = server.call("/v1/responses", {"model": "tiny", "input": [{"type": "function_call", "name": "f"}]})
    assert status == 400 and reply["error"]["param"] == "input.0.type"
    assert "'function_call'; expected 'message', 'reasoning'" in reply["error"]["message"]


# ---- usage and ends of turns -----------------------------------------------------------------------------------------


def test_usage_counts_cached_and_reasoning_tokens(server: Server) -> None:
    with server.client() as client:

        def usage(text: str, **options: Any) -> Any:
            question = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="tiny", messages=question, max_tokens=3, **options).usage

        text = "What is found in the prefix cache? " * 4
        first, again, twice = usage(text), usage(text), usage(text + "And more?", n=2)
        pages = (first.prompt_tokens - 1) // 32 * 32
        assert first.prompt_tokens_details.cached_tokens < 32 < pages == again.prompt_tokens_details.cached_tokens
        assert pages - 32 <= twice.prompt_tokens_details.cached_tokens <= twice.prompt_tokens
        assert twice.completion_tokens_details.reasoning_tokens == 6
        prompts = [list(range(10, 80)), list(range(100, 170))]
        for cached in (0, 128):  # two pages of each
            reply = client.completions.create(model="tiny", prompt=prompts, max_tokens=1)
            assert reply.usage.prompt_tokens_details.cached_tokens == cached


def test_cached_tokens_of_batches_by_transformers(model: Any) -> None:
    engine = BatchEngine(model, 64, 32, 64)
    assert engine.start() is None

    async def cached() -> int:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def deliver(item: Any) -> None:
            if not isinstance(item, Token):
                loop.call_soon_threadsafe(over.set)

        job = Job(list(range(10, 110)), 2, frozenset(), Sampling(), deliver)
        engine.add(job)
        await over.wait()
        return job.cached_tokens

    async def twice() -> list[int]:
        return [await cached(), await cached()]

    try:
        assert asyncio.run(twice()) == [0, 96]
    finally:
        engine.stop()


def test_pages_of_its_own_are_no_hits() -> None:
    """A sequence that is preempted finds what it has computed itself."""
    schedule = Schedule(pages=5, page_tokens=4, step_rows=8)
    jobs = [Job(list(range(n, n + 7)), 20, frozenset(), Sampling(), lambda item: None) for n in (0, 50)]
    for job in jobs:
        schedule.add(job)
    older, younger = schedule.sequences
    found = []  # tokens that are there when the younger one starts
    while not older.job.over or younger.line is None:
        waited = younger.line is None
        pieces = schedule.next_step(8)
        if waited and younger.line is not None:
            found.append(younger.computed)
        complete = [piece.sequence for piece in pieces if piece.is_last]
        schedule.advance(pieces)
        for sequence in complete:
            sequence.tokens.append(9)
        older.job.over = len(older.tokens) == 12
        schedule.drop_ended()
    assert found == [0, 8] and [job.cached_tokens for job in jobs] == [0, 0]


def test_the_token_that_ends_a_turn_ends_the_answer(server: Server, folder: Path, model: Any) -> None:
    """It vanished from the text, and the answer went on."""
    asked = server.ask(max_tokens=20, logit_bias={"3": 100})
    _, reply = server.call("/v1/chat/completions", asked)
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 1
    with Session(model, load_tokenizer(folder), Sampling(logit_bias={3: 100.0})) as session:
        answer = session.answer([5, 6, 7], 20, lambda piece: None)
    assert answer.finish == "stop" and answer.tokens == [3]


# ---- log probabilities -----------------------------------------------------------------------------------------------


def test_log_probabilities_have_the_chosen_token(server: Server) -> None:
    with server.client() as client:
        for count in (0, 3):
            reply = client.completions.create(
                model="tiny", prompt="The", max_tokens=30, temperature=2, seed=3, logprobs=count
            )
            found = reply.choices[0].logprobs
            sizes = set()
            for token, logprob, likeliest in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
                assert likeliest[token] == logprob
                sizes.add(len(likeliest))
            assert sizes == ({1} if count == 0 else {3, 4})


def answered(tokenizer: Any, tokens: list[int], likeliest: tuple[tuple[int, float], ...] = ()) -> Choice:
    choice = Choice(0, tokenizer, StopAutomaton(()), PlainMessage(), frozenset({3}))
    for token in tokens:
        choice.add(Token(token, -1.0, likeliest))
    choice.end("stop")
    return choice


def test_offsets_where_characters_have_several_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "a\N{GRINNING FACE} caf\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}b\N{EURO SIGN} experts"
    tokens = [*tokenizer.encode(text), 3]  # the last one is not shown
    answer = CompletionFormat("tiny", TokenTexts(tokenizer), logprobs=True, echoes=[""])
    choice = answered(tokenizer, tokens)
    assert choice.content == text
    logprobs = answer._logprobs_of(choice, choice.tokens)
    assert logprobs is not None
    offsets = logprobs["text_offset"]
    for token, offset in zip(logprobs["tokens"][:-1], offsets, strict=False):
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
    parts = tokenizer.encode("\N{GRINNING FACE}")
    assert len(parts) > 1 and offsets[1 : 2 + len(parts)] == [1] * len(parts) + [2]
    assert offsets[-1] == len(text)
    assert streamed_offsets(tokenizer, tokens) == offsets


def streamed_offsets(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Return the offsets token by token, as in a stream."""
    streamed = CompletionFormat("tiny", TokenTexts(tokenizer), logprobs=True, echoes=[""])
    grown, found = answered(tokenizer, []), []
    for token in tokens:
        grown.add(Token(token, -1.0))
        part = streamed._logprobs_of(grown, grown.tokens[-1:])
        assert part is not None
        found += part["text_offset"]
    return found


@pytest.mark.parametrize(
    ("parts", "offsets"),
    [
        # Unfinished characters, then a whole one and a letter; every byte is a token.
        ("e8 ba e2 9b ef ac e3 82 bd 61", [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]),
        ("61 e8 61 80 80 62", [0, 1, 2, 3, 4, 5]),
        ("e3 82 bd e3 82 bd e3", [0, 0, 0, 1, 1, 1, 2]),
        ("efbfbd e3 82 bd", [0, 1, 1, 1]),  # the replacement character itself
        ("e3 82bde3 82 bde3 61", [0, 0, 1, 1, 3]),  # a token has the end of a character and the beginning of another
        ("80 " * 300 + "61", [*range(301)]),  # more than are held back
    ],
)
def test_offsets_after_invalid_bytes(parts: str, offsets: list[int]) -> None:
    from tokenizers import Tokenizer, decoders, models

    letters = {byte: letter for letter, byte in token_text._byte_letters().items()}
    names = ["".join(letters[byte] for byte in bytes.fromhex(part)) for part in parts.split()]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys([*names, *letters.values()]), start=4)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=letters[0]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert streamed_offsets(tokenizer, [vocabulary[name] for name in names]) == offsets


def test_parts_of_characters_in_log_probabilities(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    face = tokenizer.encode("\N{GRINNING FACE}")
    texts = TokenTexts(tokenizer)
    choice = answered(tokenizer, face, tuple((token, -2.0) for token in face))
    logprobs = CompletionFormat("tiny", texts, logprobs=True, echoes=[""])._logprobs_of(choice, choice.tokens)
    assert logprobs is not None
    assert all(len(likeliest) == len(face) for likeliest in logprobs["top_logprobs"])  # no two have the same key
    assert logprobs["tokens"][0] == "bytes:\\xf0"
    chat = ChatFormat("tiny", texts, logprobs=True)._logprobs_of(choice.tokens)
    assert chat is not None
    assert bytes(byte for entry in chat["content"] for byte in entry["bytes"]).decode() == "\N{GRINNING FACE}"


def test_bytes_of_tokenizers_with_byte_fallback() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "a": 257}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    assert texts.of(0xE2).bytes == b"\xe2" and texts.of(0xE2).key == "bytes:\\xe2"
    assert texts.of(256).text == " a" and texts.of(257).text == "a"  # a space at the beginning is not lost


# ---- harmony ---------------------------------------------------------------------------------------------------------

CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


def test_harmony(harmony: tuple[Any, Any]) -> None:
    tokenizer, marks = harmony[1], AnswerMarks(*harmony)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    found = read(tokenizer, marks, f"{analysis}<|channel|>final<|message|>Hello.<|return|>")
    assert (found.reasoning, found.content) == ("Hm.", "Hello.")
    tools = [{"type": "function", "function": {"name": "add"}}]
    early = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'  # the recipient may come first
    for call in (CALL, early):
        found = read(tokenizer, marks, analysis + call, tools)
        assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == [("add", {"a": 1})]
        assert (found.reasoning, found.content, found.finish) == ("Hm.", "", "tool_calls")
    told = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    found = read(tokenizer, marks, told + CALL, tools)
    assert found.content == "I add." and len(found.tool_calls) == 1
    assert read(tokenizer, marks, "Just text.").content == "Just text."


TOOLS = [{"type": "function", "function": {"name": "add"}}]
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "tools", "finish", "content", "calls"),
    [
        (CALL, (), "stop", '{"a": 1}', []),
        (
            CALL.replace("<|channel|>commentary to=functions.add", " to=f<|channel|>commentary"),
            (),
            "stop",
            '{"a": 1}',
            [],
        ),
        (TO_ADD + '{"a": 1}', TOOLS, "length", "", ['{"a": 1}']),  # cut after its last character
        (TO_ADD + '{"a": ', TOOLS, "length", '{"a":', []),
        (TO_ADD, TOOLS, "length", "", []),
        (TO_ADD + "<|call|>", TOOLS, "stop", "", ["{}"]),
        (TO_ADD + '"{<|call|>', TOOLS, "stop", '"{', []),
        (TO_ADD + '"x"<|call|>', TOOLS, "stop", "", ['"x"']),
        (TO_ADD + "[" * 3000 + "<|call|>", TOOLS, "stop", "[" * 3000, []),
        (TO_ADD + "no<|end|><|start|>assistant" + CALL, TOOLS, "stop", "no", ['{"a": 1}']),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", TOOLS, "stop", "print(1)", []),
        ('<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>', (), "stop", '{"q": 1}', []),
        # Headers that are cut or malformed.
        ("<|channel|>commentary to=functions.add <|constr", TOOLS, "length", "", []),
        ("<|channel|>commentary to=functions.add <|constrain|>", (), "length", "", []),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant", (), "stop", "Yes.", []),
        ("<|channel|>final now or<|message|>Yes.", (), "stop", "final now orYes.", []),
        ("<|constrain|>Yes.<|start|>", (), "stop", "Yes.", []),
    ],
)
def test_harmony_has_no_marks_in_content(
    harmony: tuple[Any, Any], text: str, tools: Any, finish: Finish, content: str, calls: list[str]
) -> None:
    """Calls that cannot be delivered are content."""
    marks = AnswerMarks(*harmony)
    for ends in (marks.ends, marks.ends | {harmony[1].convert_tokens_to_ids("<|call|>")}):
        marks.ends = ends
        found = read(
            harmony[1], marks, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + text, tools, finish
        )
        assert (found.reasoning, found.content) == ("Hm.", content)
        assert [(call.name, call.arguments) for call in found.tool_calls] == [("add", arguments) for arguments in calls]
        assert found.finish == ("tool_calls" if calls else finish)


def test_only_the_end_of_a_turn_ends_an_answer(harmony: tuple[Any, Any]) -> None:
    """``<|end|>`` ends the reasoning too, so the answer goes on after it, even if a template ends turns with it."""
    model, tokenizer = harmony
    ends = {tokenizer.decode([end]) for end in AnswerMarks(model, tokenizer).ends}
    assert ends == {"<|im_end|>", "<|return|>"}
    other = copy.deepcopy(tokenizer)
    other.chat_template = HARMONY.replace("<|return|>", "<|end|>")
    other.eos_token = "<|endoftext|>"
    assert {other.decode([end]) for end in AnswerMarks(model, other).ends} == {"<|im_end|>", "<|endoftext|>"}


_MARKED = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}END{% endfor %}"
_MARKED += "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
_REFUSES = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (_MARKED.replace("END", "<|end|>"), "<|end|>"),
        (_MARKED.replace("END", " \n<|end|>"), "<|end|>"),
        (_MARKED.replace("END", "{% if not loop.last %}<|end|>{% endif %}"), "<|end|>"),  # the last one is left open
        (_REFUSES + _MARKED.replace("END", "<|end|>"), "<|end|>"),
        (_MARKED.replace("END", "<|end|>").replace("m.content", "m.content | upper"), "<|end|>"),
        (_MARKED.replace("END", "{% if m.role == 'user' %}<|end|>{% endif %}"), None),
        ("{{ raise_exception('never') }}", None),
        ("the same for all messages<|end|>", None),
    ],
)
def test_end_of_turn_of_templates(harmony: tuple[Any, Any], template: str, end: str | None) -> None:
    model, tokenizer = harmony
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    marks = AnswerMarks(model, other)
    marks.template = None  # as that of a model without reasoning
    ends = {other.decode([token]) for token in marks.ends} - {"<|im_end|>"}
    assert ends == (set() if end is None else {end})


@pytest.mark.parametrize(
    "start",
    ["", "<|channel|>", "<|channel|>final", "<|channel|>analysis", "<|channel|>commentary to=functions.add", " to="],
)
@pytest.mark.parametrize("unit", [" ", "a", "<|channel|>final", "<|start|>assistant", "<|constrain|>"])
def test_unfinished_marks_are_not_held_back_for_long(start: str, unit: str) -> None:
    """All of what is held back is searched again after every token."""
    text = start + 300 * unit
    for marks in ((), HARMONY_TOKENS):
        message = StructuredMessage(HARMONY_MARKS, "<|start|>assistant", TOOLS, marks)
        shown, held = message.add(start).content, 0
        for _ in range(300):
            shown += message.add(unit).content
            held = max(held, len(message._parser._buffer) - message._parser._pos)
        shown += message.rest().content
        for mark in marks:
            text = text.replace(mark, "")
        assert held < 400 and text.startswith(shown) and len(shown) >= len(text) - (held if marks else 0)


def test_another_transformers_generates_text_and_reads_no_chats(
    harmony: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = harmony
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing.response_templates", None)
    for each in (tokenizer, plain):
        marks = AnswerMarks(model, each)
        assert each.eos_token_id in marks.ends
    with pytest.raises(RuntimeError, match="reading answers needs transformers 5.22, this is"):
        marks.message([1])


def write(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Lets models write these tokens."""
    script = iter(tokens)
    monkeypatch.setattr(TokenChooser, "choose", lambda *_: Token(next(script)))


def test_chat_reads_harmony(
    harmony: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is shown, and what the next prompt has of it: the final channel alone."""
    model, tokenizer = harmony
    written = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    write(monkeypatch, tokenizer.encode(written))
    conversation = Conversation(tokenizer, None, 100)
    with Session(model, tokenizer, Sampling()) as session:
        take_turn(conversation, session, "Hi?")
    assert capsys.readouterr().out == "[reasoning]\nHm.\n[answer]\nHello.\n"
    prompt = tokenizer.decode(conversation.ask("And now?")[0])
    assert "<|start|>assistant<|channel|>final<|message|>Hello.<|end|>" in prompt and "Hm." not in prompt


def test_generate_reads_harmony(
    harmony: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer alone is on stdout; what is not asked as a question is text like any other."""
    model, tokenizer = harmony
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    written = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"

    def answer(*options: str) -> tuple[str, list[str]]:
        write(monkeypatch, tokenizer.encode(written))
        assert main(["generate", str(tmp_path), "Hi?", "--scheme", "float", *options]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err.splitlines()

    out, told = answer("--chat")
    assert out == "Hello.\n" and told[:3] == ["[reasoning]", "Hm.", "[answer]"] and len(told) == 4
    out, told = answer("--chat", "--no-stream")
    assert out == "Hello.\n" and len(told) == 1
    found = json.loads(answer("--chat", "--json")[0])
    assert (found["text"], found["reasoning"]) == ("Hello.", "Hm.")
    assert answer()[0] == "analysisHm.assistantfinalHello.\n" and "reasoning" not in json.loads(answer("--json")[0])
