"""``cpumoe serve`` as a process that is talked to over HTTP."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from every_architecture import write_family
from served_models import PATIENCE, Server, serve
from tiny_models import write_tiny_model, write_tiny_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("starlette")
from sampling import first_of

import cpumoe
from cpumoe import cpu
from cpumoe.cli import main
from cpumoe.cli.chat import Conversation
from cpumoe.generation.api_requests import ChatRequest, CompletionRequest, ResponsesRequest, parse_body
from cpumoe.generation.memory import BATCH_TOKENS, cache_size
from cpumoe.generation.session import Session
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.steps.sampling import Sampling

# Reasoning in marks that transformers knows of this family, and a variable of its own.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(str(folder), "--scheme", "w4a8-g32") as server:
        yield server


def is_free(address: str) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0


def test_says_what_it_serves(server: Server, folder: Path) -> None:
    assert server.model == str(folder)
    assert server.lines[0].startswith("cache: 16384 blocks of 32 tokens, ")  # 256 requests of full length
    assert server.lines[0].endswith("; a request may have 2048 tokens")
    assert server.lines[1] == "requests are computed together, each step in one call of the core"
    assert server.call("/health") == (200, {"status": "ok"})
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [str(folder)]
        assert client.models.retrieve(str(folder)).id == str(folder)
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'; this server has "):
            client.models.retrieve("gpt-5")


def test_chat(server: Server) -> None:
    with server.client() as client:
        question = [{"role": "user", "content": "Which experts?"}]
        reply = client.chat.completions.create(
            model=server.model, messages=question, max_completion_tokens=30, temperature=0
        )
        assert reply.model == server.model and reply.object == "chat.completion"
        assert reply.usage.completion_tokens == 30 and reply.choices[0].finish_reason == "length"
        text = reply.choices[0].message.content
        assert text and "Which experts?" not in text

        stream = client.chat.completions.create(
            model=server.model,
            messages=question,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == reply.usage and not chunks[-1].choices
        assert chunks[-2].choices[0].finish_reason == "length"
        assert len({chunk.id for chunk in chunks}) == 1 and {chunk.model for chunk in chunks} == {server.model}
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert sum(map(bool, pieces)) > 5 and "".join(pieces) == text
        parts = [
            {"role": "user", "content": [{"type": "text", "text": "Which "}, {"type": "text", "text": "experts?"}]}
        ]
        assert server.answer(messages=parts, max_tokens=30) == text


def test_several_answers_with_their_probabilities(server: Server) -> None:
    with server.client() as client:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Which experts?"}],
            max_tokens=5,
            n=3,
            temperature=1.5,
            seed=7,
            logprobs=True,
            top_logprobs=4,
        )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3
    assert reply.usage.completion_tokens == 15
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 5
        for entry in choice.logprobs.content:
            best = [alternative.logprob for alternative in entry.top_logprobs]
            assert best == sorted(best, reverse=True) and len(best) == 4 and entry.logprob <= best[0] < 0


def test_text_completions(server: Server) -> None:
    with server.client() as client:

        def complete(prompt: Any, **options: Any) -> Any:
            return client.completions.create(
                model=server.model, prompt=prompt, **{"max_tokens": 6, "temperature": 0, **options}
            )

        reply = complete("The")
        text = reply.choices[0].text
        assert reply.usage.prompt_tokens == 1 and reply.usage.total_tokens == 7 and reply.model == server.model
        assert complete("The", max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 16  # as OpenAI has it
        assert complete("The", echo=True).choices[0].text == "The" + text
        [first, second] = complete(["The", "A router"], logprobs=2).choices
        assert first.index == 0 and second.index == 1 and first.text == text != second.text
        assert len(first.logprobs.tokens) == len(first.logprobs.top_logprobs) == 6
        assert len(first.logprobs.top_logprobs[0]) == 2 and first.logprobs.text_offset[0] == 0
        assert complete([[260, 261], [262]]).usage.prompt_tokens == 3
        chunks = list(complete("The", stream=True, echo=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "The" + text
        assert chunks[-1].choices[0].finish_reason == "length"
    body = {"model": server.model, "prompt": "The", "stream": True, "max_tokens": 3}
    with server.open("/v1/completions", body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.read().endswith(b"\n\ndata: [DONE]\n\n")


def test_responses(server: Server) -> None:
    with server.client() as client:
        asked: dict[str, Any] = {
            "model": server.model,
            "input": "Which experts?",
            "instructions": "Be brief.",
            "temperature": 0,
        }
        reply = client.responses.create(**asked, max_output_tokens=12)
        assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
        assert reply.usage.output_tokens == 12 and reply.output_text and reply.model == server.model
        events = list(client.responses.create(**asked, max_output_tokens=12, stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == reply.output_text == events[-1].response.output_text
        # What was answered can be sent back.
        history = [{"role": "user", "content": "Which experts?"}, *(item.model_dump() for item in reply.output)]
        longer = client.responses.create(**{**asked, "input": history}, max_output_tokens=2)
        assert longer.usage.input_tokens > reply.usage.input_tokens
        for field, value in (("previous_response_id", "resp_1"), ("tools", [{"type": "web_search"}]), ("store", True)):
            with pytest.raises(openai.BadRequestError, match=field):
                client.responses.create(**asked, **{field: value})


def test_stop_strings_are_not_part_of_the_answer(server: Server) -> None:
    text = server.answer(max_tokens=40)
    stop = text[6:9]  # three characters of several tokens
    for stream in (False, True):
        body = server.ask(max_tokens=40, stop=["never said", stop], stream=stream)
        if not stream:
            _, reply = server.call("/v1/chat/completions", body)
            choice = reply["choices"][0]
            said = choice["message"]["content"]
            assert reply["usage"]["completion_tokens"] < 40
        else:
            with server.client() as client:
                chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body)]
            said, choice = "".join(chunk.delta.content or "" for chunk in chunks), dict(chunks[-1])
        assert said == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_each_request_has_its_own_settings(server: Server) -> None:
    greedy = server.answer()
    sampled = server.answer(temperature=1.5, seed=1)
    assert sampled == server.answer(temperature=1.5, seed=1) != server.answer(temperature=1.5, seed=2)
    assert greedy == server.answer() != sampled
    assert server.answer(temperature=1e-30) == greedy  # what would overflow is no reason to end
    assert greedy == server.answer(temperature=1.5, top_k=1) == server.answer(temperature=1.5, min_p=1.0)
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert server.answer(max_tokens=40, **penalty) != server.answer(max_tokens=40)
    assert server.answer(logit_bias={"37": 100}) == 8 * server.answer(logit_bias={"37": 100}, max_tokens=1)


def test_eight_streams_at_once(server: Server) -> None:
    def answer(number: int) -> str:
        # The same name for all must not mix them up.
        with server.client() as client:
            stream = client.chat.completions.create(
                **server.ask(f"Question {number}?", max_tokens=40, stream=True, temperature=1, seed=number),
                extra_headers={"x-request-id": "one"},
            )
            chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason in ("length", "stop")
        return "".join(chunk.delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(answer, range(8)))) == 8


REFUSED = [
    ({"model": "gpt-5"}, 404, "model", "there is no model 'gpt-5'"),
    ({"model": None}, 400, "model", "model is needed"),
    ({"messages": None}, 400, "messages", "messages is needed"),
    ({"messages": []}, 400, "messages", "at least 1 item"),
    ({"messages": "hi"}, 400, "messages", "messages is 'hi'"),
    ({"messages": [{"content": "no role"}]}, 400, "messages.0.role", "is needed"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role", "messages.0.role is 'wizard'"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0", "needs content"),
    ({"messages": [{"role": "user", "reasoning_content": "So."}]}, 400, "messages.0", "needs content"),
    ({"messages": ["hi"]}, 400, "messages.0", "messages.0 is 'hi': input should be a valid object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content.0.type",
        "image_url",
    ),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": "many"}, 400, "max_tokens", "max_tokens is 'many'"),
    ({"max_tokens": True}, 400, "max_tokens", "max_tokens is True"),
    ({"max_tokens": 5000}, 400, None, "there is room for 2048 in all"),
    ({"max_completion_tokens": 4}, 400, "max_tokens", "two names of one thing"),
    ({"temperature": 3}, 400, "temperature", "temperature is 3"),
    ({"temperature": -1}, 400, "temperature", "temperature is -1"),
    ({"temperature": "warm"}, 400, "temperature", "temperature is 'warm'"),
    ({"top_p": 0}, 400, "top_p", "top_p is 0"),
    ({"n": 1000}, 400, "n", "n is 1000"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "with logprobs: true only"),
    ({"stop": [""]}, 400, "stop.0", "at least 1 character"),
    ({"stop": ["x"] * 17}, 400, "stop", "at most 16 items, not 17"),
    ({"stop": 5}, 400, "stop", "should be a valid string or a valid list"),
    ({"logit_bias": []}, 400, "logit_bias", "logit_bias is []"),
    ({"logit_bias": {"100000": 1}}, 400, "logit_bias", "tokens from 0 to"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "only {'type': 'text'} is served"),
    ({"tool_choice": "required"}, 400, "tool_choice", "tool_choice is 'required'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "tools is not served"),
    ({"tools": "garbage", "tool_choice": "none"}, 400, "tools", "tools is 'garbage': input should be a valid list"),
    ({"store": True}, 400, "store", "only False is served"),
    ({"audio": {}}, 400, "audio", "audio is {}; it is not served"),
    ({"verbosity": "low"}, 400, "verbosity", "only 'medium' is served"),
    ({"metadata": {"a": 1}}, 400, "metadata.a", "metadata.a is 1"),
    ({"prompt_cache_options": {"mode": "explicit"}}, 400, "prompt_cache_options.mode", "only 'implicit' is served"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        400,
        "tools.0.function.strict",
        "only False is served",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
        400,
        "parallel_tool_calls",
        "with tools only True is served",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
        "only",
    ),
    ({"modalities": ["audio"]}, 400, "modalities", "modalities"),
    ({"stream_options": {"include_usage": True}, "stream": False}, 400, "stream_options", "with stream only"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, None, "there is room for 2048 in all"),
    ({"dance": True}, 400, "dance", "dance is not served"),
    # What came as an attack: templates and options of the tokenizer.
    (
        {"chat_template_kwargs": {"chat_template": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"}},
        400,
        "chat_template_kwargs.chat_template",
        "is not a variable of this model's chat template",
    ),
    ({"chat_template_kwargs": {"padding": "max_length"}}, 400, "chat_template_kwargs.padding", "not a variable"),
    ({"chat_template_kwargs": {"max_length": 300000000}}, 400, "chat_template_kwargs.max_length", "not a variable"),
    ({"chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs.messages", "not a variable"),
    (
        {"chat_template_kwargs": {"enable_thinking": 10**9}},
        400,
        "chat_template_kwargs.enable_thinking",
        "up to 1000000",
    ),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", "chat_template is not served"),
]


@pytest.mark.parametrize(("change", "status", "param", "message"), REFUSED)
def test_refuses_requests_and_goes_on(
    server: Server, change: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    for stream in (False, True):
        seen, reply = server.call("/v1/chat/completions", server.ask(**{"stream": stream, **change}))
        assert seen == status and reply.keys() == {"error"}
        assert reply["error"].keys() == {"message", "type", "param", "code"}
        assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["param"] == param
        assert message in reply["error"]["message"]
    assert server.call("/health")[0] == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "prompt is needed"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [""]}, "prompt.0 is empty"),
        ({"prompt": [[5], []]}, "prompt.1 is empty"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": ["a", 1]}, "prompt.1 is 1: input should be a valid string"),
        ({"prompt": [[5], "a"]}, "prompt.1 is 'a': input should be a valid list"),
        ({"prompt": [1.5]}, "prompt.0 is 1.5: input should be a valid integer or a valid string or a valid list"),
        ({"prompt": [-1]}, "outside of the model's vocabulary"),
        ({"prompt": [10**6]}, "outside of the model's vocabulary"),
        ({"prompt": ["x"] * 65}, "64 answers at most"),
        ({"suffix": "end"}, "suffix is 'end'"),
        ({"best_of": 3}, "best_of is 3"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs is not served"),
        ({"messages": []}, "messages is not served"),
    ],
)
def test_refuses_completions(server: Server, change: dict[str, Any], message: str) -> None:
    status, reply = server.call("/v1/completions", {"model": server.model, "prompt": "The", **change})
    assert status == 400 and message in reply["error"]["message"]


TOOL = {"type": "function", "function": {"name": "f"}}
ANYWAY: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"store": False, "response_format": {"type": "text"}, "tool_choice": "auto", "audio": None}),
    ("chat", {"tools": [TOOL], "tool_choice": "none"}),
    ("chat", {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False}),
    ("chat", {"tools": [], "parallel_tool_calls": False, "functions": [], "function_call": "none"}),
    ("chat", {"metadata": {}, "modalities": [], "verbosity": "medium", "reasoning_effort": "medium"}),
    ("chat", {"metadata": {"run": "7"}, "user": "me", "safety_identifier": "me", "prompt_cache_key": "k"}),
    ("chat", {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}),
    ("chat", {"logprobs": False, "top_logprobs": 0, "stream_options": {"include_usage": False}}),
    ("chat", {"stream_options": {"include_obfuscation": False}, "service_tier": "default"}),
    ("chat", {"prediction": {"type": "content", "content": "Experts are."}, "stop": [], "logit_bias": {}}),
    (
        "chat",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Which experts?", "prompt_cache_breakpoint": {"mode": "explicit"}}
                    ],
                    "annotations": [],
                    "refusal": "",
                    "tool_calls": [],
                    "audio": None,
                }
            ]
        },
    ),
    ("completions", {"best_of": 1, "suffix": "", "user": "me", "metadata": {}, "stream_options": {}}),
    ("responses", {"text": {"verbosity": "medium", "format": {"type": "text"}}, "parallel_tool_calls": False}),
    (
        "responses",
        {"reasoning": {"effort": "medium", "summary": None}, "include": [], "tools": [], "metadata": {"a": "b"}},
    ),
    (
        "responses",
        {"stream_options": {"include_obfuscation": False}, "context_management": [], "truncation": "disabled"},
    ),
]


@pytest.mark.parametrize(("kind", "fields"), ANYWAY)
def test_fields_that_ask_for_what_happens_anyway(server: Server, kind: str, fields: dict[str, Any]) -> None:
    path, body = {
        "chat": ("/v1/chat/completions", server.ask()),
        "completions": ("/v1/completions", {"model": server.model, "prompt": "The"}),
        "responses": ("/v1/responses", {"model": server.model, "input": "Which experts?", "max_output_tokens": 8}),
    }[kind]

    def answer(body: dict[str, Any]) -> Any:
        status, reply = server.call(path, body)
        assert status == 200, reply
        return [part["content"] for part in reply["output"]] if kind == "responses" else reply["choices"]

    assert answer(body | fields) == answer(body)


def test_a_streamed_tool_call_can_be_sent_back() -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "f?"}, {"role": "assistant", "tool_calls": [call]}]
    assert parse_body(ChatRequest, json.dumps({"model": "x", "messages": messages}).encode()).messages[1].tool_calls


def test_all_fields_of_the_official_client_are_known() -> None:
    """A request type of the client has no field that the server calls unknown, except those for pictures and sound."""
    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for official, ours in (
        (chat.CompletionCreateParamsBase, ChatRequest),
        (text.CompletionCreateParamsBase, CompletionRequest),
        (responses.ResponseCreateParamsBase, ResponsesRequest),
    ):
        assert set(official.__annotations__) <= set(ours.model_fields)


def test_variables_of_the_template(server: Server) -> None:
    def prompt_tokens(**variables: Any) -> int:
        _, reply = server.call("/v1/chat/completions", server.ask(chat_template_kwargs=variables))
        return int(reply["usage"]["prompt_tokens"])

    assert prompt_tokens(enable_thinking=False) > prompt_tokens(enable_thinking=True) == prompt_tokens()


def test_refuses_what_is_no_json(server: Server) -> None:
    for body in (b"{", b"\xff", b"[]", b"", b"[" * 10000, b'{"max_tokens": 1e400}', b'{"n": ' + b"9" * 5000 + b"}"):
        status, reply = server.call("/v1/chat/completions", body)
        assert status == 400 and reply["error"]["message"]
    assert server.answer()


def test_refuses_long_bodies_before_reading_them(server: Server) -> None:
    status, reply = server.call("/v1/completions", {"model": server.model, "prompt": "x" * (2 << 20)})
    assert status == 413 and "is longer than the 1048576 bytes" in reply["error"]["message"]
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as connection:
        # A length that is only announced is enough.
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in connection.recv(1000)
    assert server.answer()


@pytest.mark.parametrize(
    "path",
    ["/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions", "/", "/v1", "/docs", "/v1/embeddings"],
)
def test_nothing_else_is_served(server: Server, path: str) -> None:
    for body in (None, {}):
        status, reply = server.call(path, body)
        assert status == 404 and f"{path} is not served" in reply["error"]["message"]
    assert server.call("/v1/models", {})[0] == 405  # a GET


def test_a_client_that_leaves(server: Server) -> None:
    response = server.open("/v1/chat/completions", server.ask(stream=True, max_tokens=2000))
    assert response.read(10)
    response.close()
    assert server.answer()


@pytest.mark.parametrize("options", [["--scheme", "w4a8-g32"], ["--scheme", "float", "--sequential"]])
def test_generate_and_chat_answer_as_the_server_does(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a native decoder, and without one."""
    messages = [{"role": "user", "content": "Which experts?"}]
    with serve(str(folder), *options, "--name", "tiny") as server:
        asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        _, reply = server.call("/v1/chat/completions", asked)
        first = reply["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
        _, reply = server.call("/v1/chat/completions", asked)
        second = reply["choices"][0]["message"]["content"]
        assert server.stop()[0] == 0
    scheme = options[:2]
    arguments = ["generate", str(folder), "Which experts?", "--chat", *scheme, "--max-new-tokens", "12", "--greedy"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{first}\n"
    tokenizer = load_tokenizer(folder)
    conversation = Conversation(tokenizer, 2048, 12)
    with Session(cpumoe.load_model(folder, scheme=scheme[1]), tokenizer, Sampling()) as session:
        for question, expected in (("Which experts?", first), ("And now?", second)):
            prompt, length, _ = conversation.ask(question)
            answer = session.answer(prompt, length, lambda piece: None, lambda piece: None)
            assert answer.text == expected
            conversation.add(question, answer.text)
    # What the first turn computed, as far as its text has the same tokens again.
    assert answer.prefilled <= answer.prompt_tokens - 16


def test_answers_do_not_begin_with_the_prompt(folder: Path, tmp_path: Path) -> None:
    """A template of another kind than transformers' parser of this family expects."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}Q: {{ message['content'] }}\nA:{% endfor %}"
    )
    memory_gb = 0.0025 * cpu.float_dtype()[0].itemsize  # the KV cache is bf16 or, on CPUs without bf16 products, fp32
    with serve(str(tmp_path), "--scheme", "float", "--name", "tiny@home", "--memory-gb", str(memory_gb)) as server:
        assert server.model == "tiny@home" and "Q:" not in server.answer("Who?", max_tokens=20)
        # Cut where the cache ends, which the model's context would not yet demand.
        limit = int(server.lines[0].rpartition(" may have ")[2].split()[0])
        assert limit < 2048
        prompt = {"model": "tiny@home", "prompt": "x" * (limit - 8)}
        status, reply = server.call("/v1/completions", {**prompt, "max_tokens": 8})
        assert status == 200 and reply["usage"]["total_tokens"] == limit and reply["model"] == "tiny@home"
        status, reply = server.call("/v1/completions", prompt)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        code, seconds = server.stop()
        assert code == 0 and seconds < 60 and is_free(server.address)


def check_sequential(server: Server) -> None:
    assert len(server.lines) == 1  # nothing about a cache
    text = server.answer(max_tokens=40)
    letter = next(letter for letter in text[5:] if letter.isascii() and letter.isalpha())
    _, reply = server.call("/v1/chat/completions", server.ask(max_tokens=40, stop=[letter]))
    assert reply["choices"][0]["message"]["content"] == text[: text.index(letter)]
    assert reply["usage"]["completion_tokens"] < 40 and reply["choices"][0]["finish_reason"] == "stop"
    sampled = server.answer(temperature=1.5, seed=1)
    assert sampled == server.answer(temperature=1.5, seed=1) != server.answer()
    status, reply = server.call("/v1/chat/completions", server.ask("x" * 3000))
    assert status == 400 and "there is room for 2048" in str(reply)


@pytest.mark.parametrize("mode", first_of(["steps", "batched", "sequential"], 1))
def test_ends_while_it_answers(mode: str, folder: Path) -> None:
    options = ["--sequential"] if mode == "sequential" else []
    with serve(str(folder), "--scheme", "w4a8-g32" if mode == "steps" else "float", *options) as server:
        if mode == "sequential":
            check_sequential(server)
        else:
            assert ("in one call of the core" if mode == "steps" else "by transformers'") in server.lines[1]
        others = 64 if mode == "steps" else 1  # alone it might be over before the server is told to end
        with ThreadPoolExecutor(1) as pool:
            with server.open("/v1/chat/completions", server.ask(stream=True, max_tokens=2000)) as streamed:
                assert streamed.read(10)
                waiting = pool.submit(server.call, "/v1/chat/completions", server.ask(max_tokens=2000, n=others))
                time.sleep(0.5)
                code, seconds = server.stop(signal.SIGINT if mode == "sequential" else signal.SIGTERM)
                # 2 s for the answers, 3 s for the step being computed; the rest is a busy machine's
                assert code == 0 and seconds < 60
                last = json.loads(streamed.read().decode().strip().rpartition("data: ")[2])
                assert last["error"]["message"].startswith("the server is ending")
            status, reply = waiting.result()
            assert status == 503 and reply["error"]["message"].startswith("the server is ending")
        assert is_free(server.address)


@pytest.mark.full
def test_a_model_that_cannot_be_batched(tmp_path: Path) -> None:
    """Keys and values of other sizes than transformers' batches have."""
    with serve(str(write_tiny_model(tmp_path, "deepseek_v3")), "--scheme", "float") as server:
        assert server.lines[0].startswith("requests are answered one at a time, since batching fails for this model: ")
        assert server.answer()
        assert server.stop()[0] == 0


@pytest.mark.full
def test_keys_and_values_in_int8(folder: Path, tmp_path: Path) -> None:
    """Pages are in int8; a model that has no steps to logits answers one request at a time rather than in float."""
    lines = []
    for more in ([], ["--kv-cache", "int8"]):
        with serve(str(folder), "--scheme", "w4a8-g32", "--memory-gb", "0.002", *more) as server:
            assert "in one call of the core" in server.lines[1] and server.answer()
            lines.append(server.lines[0])
            assert server.stop()[0] == 0
    floats, records = (int(line.split()[1]) for line in lines)  # cache: N blocks of ..
    assert records > 1.4 * floats  # each has a place in the page table too
    tokens = write_tiny_tokenizer(tmp_path)
    write_family(tmp_path, "granitemoe", vocab_size=tokens, logits_scaling=4.0)  # it divides its logits
    with serve(str(tmp_path), "--scheme", "w4a8-g32", "--kv-cache", "int8") as server:
        assert server.lines[0].startswith("requests are answered one at a time") and "in float" in server.lines[0]
        assert server.answer()
        assert server.stop()[0] == 0


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(arguments: Any) -> None:
        raise AssertionError("a model was loaded for what had to be refused before")

    monkeypatch.setattr("cpumoe.cli.serve.load_chosen_model", load_model)


def test_refuses_to_start(
    folder: Path,
    tmp_path: Path,
    no_loading: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    assert "no network interface of this machine has that address" in told(str(folder), "--host", "192.0.2.1")
    assert "--host no.such.host.invalid" in told(str(folder), "--host", "no.such.host.invalid")
    assert "there is no such folder" in told(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "there is no tokenizer" in told(str(tmp_path))
    assert "--memory-gb has no effect" in told(str(folder), "--sequential", "--memory-gb", "1")
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "needs starlette: pip install 'cpumoe[serve]'" in told(str(folder))


def test_a_second_server_is_refused_while_the_first_one_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = str(chosen.getsockname()[1])
    second: list[int] = []

    def load_model(*_: Any, **__: Any) -> None:
        assert not second, "both load the model"
        second.append(-1)
        second[0] = main(["serve", str(folder), "--port", port])
        raise ValueError("loaded enough")

    monkeypatch.setattr("cpumoe.cli.serve.load_chosen_model", load_model)
    assert main(["serve", str(folder), "--port", port]) == 2 and second == [2]
    told = capsys.readouterr().err.splitlines()
    assert f"--port {port}: Address already in use; end the program that listens there, or choose" in told[0]
    assert told[1].endswith("loaded enough")


def test_more_idle_connections_than_files(folder: Path, tmp_path: Path) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with (
        (tmp_path / "log").open("w") as log,
        serve(str(folder), "--scheme", "w4a8-g32", stderr=log, preexec_fn=few_files) as server,
    ):
        port = int(server.address.rpartition(":")[2])
        with ExitStack() as opened:
            idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
            for connection in idle[:3]:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                connection.settimeout(PATIENCE)
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert server.call("/health") == (200, {"status": "ok"}) and server.answer()
        assert server.stop()[0] == 0
    told = (tmp_path / "log").read_text().splitlines()
    assert len(told) == 1 and "connections are open: more of them wait" in told[0]


def test_clients_that_send_anything_do_not_fill_the_log(folder: Path, tmp_path: Path) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    with (tmp_path / "log").open("w") as log, serve(str(folder), "--scheme", "w4a8-g32", stderr=log) as server:
        address = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        for request, status in ((b"garbage\r\n\r\n", b"400"), (upgrade, b"200")):
            for _ in range(20):
                with socket.create_connection(address, timeout=PATIENCE) as connection:
                    connection.sendall(request)
                    assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
        assert server.stop()[0] == 0
    assert (tmp_path / "log").read_text().splitlines() == ["WARNING:  Invalid HTTP request received."]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", "70000", "from 0 to 65535"),
        ("--port", "x", "from 0 to 65535"),
        ("--memory-gb", "-1", "a number above 0"),
    ],
)
def test_refuses_numbers(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["serve", "folder", option, value])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_the_size_of_the_cache() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen3_moe",
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
    )
    token_bytes = 48 * 4 * 128 * 2 * 2 + BATCH_TOKENS * 2 + (2 * 32 + 4) * 128 * 2
    mask_bytes = BATCH_TOKENS**2 * 2
    plan = cache_size(config, torch.bfloat16, 20 * 10**9, None)
    assert plan.block_tokens == 32 and plan.blocks == (10 * 10**9 - mask_bytes) // (32 * token_bytes)
    assert plan.total_bytes == mask_bytes + plan.blocks * 32 * token_bytes <= 10 * 10**9
    assert cache_size(config, torch.float32, 20 * 10**9, None).blocks < plan.blocks / 1.9
    assert cache_size(config, torch.bfloat16, 20 * 10**9, 5).blocks < plan.blocks / 1.9
    # The default is no larger than for all requests of a batch at full length; what was asked for is used whole.
    assert cache_size(config, torch.bfloat16, 10**13, None).blocks * 32 == 64 * 40960
    assert 4.99e12 < cache_size(config, torch.bfloat16, 10**13, 5000).total_bytes <= 5 * 10**12
    # Without masks and copies.
    states = cache_size(config, torch.bfloat16, 20 * 10**9, None, token_bytes=12288, state_bytes=10**8)
    assert states.sequences == 25 and states.total_bytes <= 10**10  # a quarter of half of the memory
    assert cache_size(config, torch.bfloat16, 20 * 10**9, None, token_bytes=12288, state_bytes=1).sequences == 256
    plan = cache_size(config, torch.bfloat16, 20 * 10**9, None, token_bytes=48 * 4 * 128 * 2 * 2)
    assert plan.blocks == 10 * 10**9 // (32 * 48 * 4 * 128 * 2 * 2 + 256 * 4) and plan.total_bytes <= 10 * 10**9
    plan = cache_size(config, torch.bfloat16, 10**14, None, token_bytes=12288)
    assert plan.blocks * 32 == 256 * 40960
    plan = cache_size(config, torch.bfloat16, 10**14, 20_000, token_bytes=12288)
    assert 1.999e13 < plan.total_bytes <= 2 * 10**13
    with pytest.raises(ValueError, match="--memory-gb 30; the model leaves 20.0 GB"):
        cache_size(config, torch.bfloat16, 20 * 10**9, 30)
    with pytest.raises(ValueError, match="a cache of 512 tokens takes .* MB; half of what the model leaves is 5.0 MB"):
        cache_size(config, torch.bfloat16, 10**7, None)
    with pytest.raises(ValueError, match="half of what the model leaves is 0 B"):
        cache_size(config, torch.bfloat16, -(10**7), None)
