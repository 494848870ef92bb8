"""A real ``vllm serve``, asked as users ask it; and what is left of it when one of its workers dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from conftest import CPUS, is_right, needs_two_cpus
from vllm_servers import free_port, is_healthy

_START_SECONDS = 300.0


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    log: Path
    client: openai.OpenAI


@contextmanager
def _serving(folder: str, log: Path, *options: str, **environment: str) -> Iterator[_Server]:
    """``vllm serve``, which answers; it and all of its processes end with the block."""
    port = free_port()
    command = [Path(sys.executable).with_name("vllm"), "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    sizes = ["--max-model-len", "128", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(1 << 26)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *sizes, "--served-model-name", "model", "--dtype", "float32", *options],
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + _START_SECONDS
        while not is_healthy(port):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(0.3)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
        yield _Server(process, log, client)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _streamed(client: openai.OpenAI, prompt: list[int], count: int) -> tuple[list[int], str]:
    """The tokens of a streamed completion, and its text."""
    stream = client.completions.create(
        model="model",
        prompt=prompt,
        max_tokens=count,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens: list[int] = []
    text = ""
    for part in stream:
        for choice in part.choices:
            tokens += getattr(choice, "token_ids", None) or []
            text += choice.text
    return tokens, text


def test_eight_streams(cases: dict[str, Any], tmp_path: Path) -> None:
    """The shipped model as vLLM serves it by default, compiled: eight clients at once get what one gets alone."""
    case = cases["shipped"]
    answers = [case["answers"][i % len(case["answers"])] for i in range(8)]
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    with _serving(case["folder"], tmp_path / "log", **environment) as server:
        client = server.client
        assert [model.id for model in client.models.list().data] == ["model"]
        with ThreadPoolExecutor(8) as clients:
            streams = [clients.submit(_streamed, client, a["prompt"], len(a["tokens"])) for a in answers]
            found = [stream.result() for stream in streams]
        is_right([{"tokens": tokens} for tokens, _ in found], answers)
        assert all(text for _, text in found)
        completion = client.completions.create(model="model", prompt="def main(", max_tokens=8, temperature=0)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="model", prompt=[5] * 200, max_tokens=8)
    log = server.log.read_text()
    assert log.count("computes the experts (w4a8-g128) and the quantised linears (w4a8-g128) of this model") == 1
    assert server.process.returncode == 0, log[-3000:]


def _left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("cpumoe-*")}


@needs_two_cpus
def test_a_worker_dies(cases: dict[str, Any], tmp_path: Path) -> None:
    """Two workers answer as one does. When one dies vLLM ends, and so does all that they shared; nobody waits."""
    case, before = cases["int-quantized w4a8-g32"], _left_in_shared_memory()
    options = ("--enforce-eager", "--tensor-parallel-size", "2", "--skip-tokenizer-init")
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[1]}"}
    with _serving(case["folder"], tmp_path / "log", *options, **bound) as server:
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        workers = [one for one in everyone if "worker" in one.name().lower() or "Worker" in " ".join(one.cmdline())]
        assert len(workers) == 2, [(one.name(), one.cmdline()) for one in everyone]
        asked = ((answer["prompt"], len(answer["tokens"])) for answer in case["answers"])
        is_right([{"tokens": _streamed(server.client, *one)[0]} for one in asked], case["answers"])
        workers[1].suspend()  # the other one waits for it in the middle of a step
        with ThreadPoolExecutor(1) as clients:
            stream = clients.submit(_streamed, server.client, [5, 6, 7], 60)
            time.sleep(1)
            assert not stream.done()
            workers[1].kill()
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                stream.result(60)
        server.process.wait(60)  # vLLM's exit status is 0
        _, alive = psutil.wait_procs(everyone, 30)
        assert not alive
    assert _left_in_shared_memory() == before
