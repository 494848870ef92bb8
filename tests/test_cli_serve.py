"""``cpumoe serve`` as a process that is talked to over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from cpumoe.cli import main
from cpumoe.cli.serve import BATCH_TOKENS, available_bytes, plan_cache

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PATIENCE = 120.0  # seconds; other work may be running on the machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Server:
    """A running ``cpumoe serve``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []  # up to the one that names the address
        assert process.stdout is not None
        while not self.lines or not self.lines[-1].startswith("model: "):
            line = process.stdout.readline()
            assert line, f"the server ended: {self.lines}"
            self.lines.append(line.rstrip())
        _, self.model, address = self.lines[-1].split('"')
        self.address = address.removeprefix(" at ").removesuffix("/v1")

    def open(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"content-type": "application/json", **(headers or {})}
        )
        return DIRECTLY.open(request, timeout=PATIENCE)

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON, also where the status is an error."""
        try:
            with self.open(path, body, headers) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refusal:
            return refusal.code, json.load(refusal)

    def ask(self, text: str = "Which experts?", **options: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
            **options,
        }

    def answer(self, *arguments: str, **options: Any) -> str:
        status, reply = self.call("/v1/chat/completions", self.ask(*arguments, **options))
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and the seconds it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE), time.monotonic() - started


@contextmanager
def serve(*arguments: str) -> Iterator[Server]:
    program = "import sys; from cpumoe.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        # Whatever happens, the process does not outlive the test.
        timer = threading.Timer(4 * PATIENCE, process.kill)
        timer.start()
        try:
            yield Server(process)
        finally:
            timer.cancel()
            process.kill()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(str(folder), "--scheme", "w4a8-g32") as server:
        yield server


def is_free(address: str) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0


def test_says_what_it_serves(server: Server, folder: Path) -> None:
    assert server.model == str(folder)
    assert server.lines[0].startswith("cache: 512 blocks of 32 tokens, ")
    assert server.lines[0].endswith("; a request may have 2048 tokens")
    assert server.call("/health") == (200, {"status": "ok"})
    status, models = server.call("/v1/models")
    assert status == 200 and [model["id"] for model in models["data"]] == [str(folder)]


def test_answers(server: Server) -> None:
    status, reply = server.call("/v1/chat/completions", server.ask())
    assert status == 200
    assert reply["usage"]["completion_tokens"] == 8 and reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"]
    assert server.answer(max_tokens=3) != server.answer(max_completion_tokens=8)
    status, reply = server.call("/v1/completions", {"model": server.model, "prompt": "The", "max_tokens": 4})
    assert status == 200 and reply["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}


def test_answers_in_pieces(server: Server) -> None:
    with server.open("/v1/chat/completions", server.ask(stream=True, max_tokens=30)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert len(choices) > 5 and choices[-1]["finish_reason"] == "length"
    # transformers leaves out of the pieces what never became a character.
    assert server.answer(max_tokens=30).startswith(text) and text


def test_each_request_has_its_own_settings(server: Server) -> None:
    greedy = server.answer()
    sampled = server.answer(temperature=1.5, seed=1)
    assert sampled == server.answer(temperature=1.5, seed=1) != server.answer(temperature=1.5, seed=2)
    assert greedy == server.answer() != sampled
    assert server.answer(temperature=1e-30) == greedy  # what would overflow is no reason to end
    assert server.answer(frequency_penalty=1.0, max_tokens=40) != server.answer(max_tokens=40)


def test_requests_at_the_same_time(server: Server) -> None:
    # The same name for both must not mix them up.
    def answer(text: str) -> tuple[int, Any]:
        return server.call("/v1/chat/completions", server.ask(text, max_tokens=40), {"x-request-id": "one"})

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(answer, ["Which experts?", "Who routes?"]))
    assert [status for status, _ in replies] == [200, 200]
    texts = [reply["choices"][0]["message"]["content"] for _, reply in replies]
    assert texts[0] != texts[1] and all(reply["usage"]["completion_tokens"] == 40 for _, reply in replies)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-5"}, "pinned to"),
        ({"messages": None}, "bad request"),
        ({"messages": "hi"}, "bad request"),
        ({"messages": [{"content": "no role"}]}, "bad request"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "bad request"),
        ({"temperature": "warm"}, "bad request"),
        ({"stop": ["."]}, "stop is taken only by a server started with --sequential"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "there is room for 2048 with the answer"),
        ({"dance": True}, "dance"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refuses_requests_and_goes_on(server: Server, change: dict[str, Any], message: str, stream: bool) -> None:
    status, reply = server.call("/v1/chat/completions", server.ask(stream=stream, **change))
    assert 400 <= status < 500 and message in str(reply)
    assert server.call("/health")[0] == 200


def test_refuses_what_is_no_json(server: Server) -> None:
    for body in (b"{", b"\xff", b"[]", b""):
        assert 400 <= server.call("/v1/chat/completions", body)[0] < 500
    assert server.answer()


def test_the_model_cannot_be_taken_away(server: Server) -> None:
    before = server.answer()
    assert server.call("/reset", {})[0] == 200
    with server.open("/load_model", {"model": "another"}) as response:
        assert b"this server has" in response.read()
    assert server.answer() == before


def test_a_client_that_leaves(server: Server) -> None:
    response = server.open("/v1/chat/completions", server.ask(stream=True, max_tokens=2000))
    assert response.read(10)
    response.close()
    assert server.answer()


def test_ends_when_told(folder: Path) -> None:
    with serve(str(folder), "--scheme", "float", "--name", "tiny@home", "--memory-gb", "0.005") as server:
        assert server.model == "tiny@home" and server.answer()
        # Cut where the cache ends, which the model's context would not yet demand.
        limit = int(server.lines[0].rpartition(" may have ")[2].split()[0])
        assert limit < 2048
        status, reply = server.call("/v1/completions", {"model": "tiny@home", "prompt": "x" * (limit - 8)})
        assert status == 200 and reply["usage"]["total_tokens"] == limit
        code, seconds = server.stop()
        assert code == 0 and seconds < 60 and is_free(server.address)


def check_sequential(server: Server) -> None:
    assert len(server.lines) == 1  # nothing about a cache
    text = server.answer(max_tokens=40)
    letter = next(letter for letter in text[5:] if letter.isascii() and letter.isalpha())
    _, reply = server.call("/v1/chat/completions", server.ask(max_tokens=40, stop=[letter]))
    assert reply["usage"]["completion_tokens"] < 40 and reply["choices"][0]["finish_reason"] == "stop"
    sampled = server.answer(temperature=1.5, seed=1)
    assert sampled == server.answer(temperature=1.5, seed=1) != server.answer()
    status, reply = server.call("/v1/chat/completions", server.ask("x" * 3000))
    assert status == 400 and "there is room for 2048" in str(reply)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_ends_while_it_answers(mode: str, folder: Path) -> None:
    options = ["--sequential"] if mode == "sequential" else []
    with serve(str(folder), "--scheme", "float", *options) as server:
        if mode == "sequential":
            check_sequential(server)
        with ThreadPoolExecutor(1) as pool:
            with server.open("/v1/chat/completions", server.ask(stream=True, max_tokens=2000)) as streamed:
                assert streamed.read(10)
                waiting = pool.submit(server.call, "/v1/chat/completions", server.ask(max_tokens=2000))
                time.sleep(0.5)
                code, seconds = server.stop(signal.SIGINT if mode == "sequential" else signal.SIGTERM)
                # 2 s for the answers, 3 s for the step being computed; the rest is a busy machine's
                assert code == 0 and seconds < 60
                assert b'"error"' in streamed.read()
            assert waiting.result()[0] == 503
        assert is_free(server.address)


def test_a_model_that_cannot_be_batched(tmp_path: Path) -> None:
    """Keys and values of other sizes than transformers' batches have."""
    with serve(str(write_tiny_model(tmp_path, "deepseek_v3")), "--scheme", "float") as server:
        assert server.lines[0].startswith("requests are answered one at a time, since batching fails for this model: ")
        assert server.answer()
        assert server.stop()[0] == 0


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(arguments: Any) -> None:
        raise AssertionError("a model was loaded for what had to be refused before")

    monkeypatch.setattr("cpumoe.cli.serve.load_model", load_model)


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

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use" in told(str(folder), "--port", str(port))
    assert "--host no.such.host.invalid" in told(str(folder), "--host", "no.such.host.invalid")
    assert "there is no such folder" in told(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "there is no tokenizer" in told(str(tmp_path))
    assert "--memory-gb has no effect" in told(str(folder), "--sequential", "--memory-gb", "1")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "needs fastapi: pip install 'cpumoe[serve]'" in told(str(folder))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--port", "70000", "0 to 65535"), ("--port", "x", "0 to 65535"), ("--memory-gb", "-1", "a number above 0")],
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
    plan = plan_cache(config, torch.bfloat16, 20 * 10**9, None)
    assert plan.block_tokens == 32 and plan.blocks == (10 * 10**9 - mask_bytes) // (32 * token_bytes)
    assert plan.total_bytes == mask_bytes + plan.blocks * 32 * token_bytes <= 10 * 10**9
    assert plan_cache(config, torch.float32, 20 * 10**9, None).blocks < plan.blocks / 1.9
    assert plan_cache(config, torch.bfloat16, 20 * 10**9, 5).blocks < plan.blocks / 1.9
    assert plan_cache(config, torch.bfloat16, 10**12, None).blocks * 32 == 8 * 40960
    with pytest.raises(ValueError, match="--memory-gb 30; the model leaves 20.00 GB"):
        plan_cache(config, torch.bfloat16, 20 * 10**9, 30)
    with pytest.raises(ValueError, match="a cache of 512 tokens takes .* MB; half of what the model leaves is 5.00 MB"):
        plan_cache(config, torch.bfloat16, 10**7, None)
    with pytest.raises(ValueError, match="half of what the model leaves is 0.00 MB"):
        plan_cache(config, torch.bfloat16, -(10**7), None)


def test_available_memory() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
