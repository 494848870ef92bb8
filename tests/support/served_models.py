"""A running ``cpumoe serve``, talked to over HTTP as any client would, or with OpenAI's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PATIENCE = 120.0  # seconds; other work may be running on the machine


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

    def client(self) -> openai.OpenAI:
        """OpenAI's client, which asks once and takes no detour."""
        return openai.OpenAI(
            base_url=f"{self.address}/v1",
            api_key="none",
            max_retries=0,
            timeout=PATIENCE,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and the seconds it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE), time.monotonic() - started


@contextmanager
def serve(*arguments: str, **options: Any) -> Iterator[Server]:
    """``options`` are for the process (:class:`subprocess.Popen`)."""
    program = "import sys; from cpumoe.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    ) as process:
        # Whatever happens, the process does not outlive the test.
        timer = threading.Timer(4 * PATIENCE, process.kill)
        timer.start()
        try:
            yield Server(process)
        finally:
            timer.cancel()
            process.kill()
