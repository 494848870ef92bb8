"""Malformed requests against a running server: each is answered or refused in OpenAI's form, and the next is served."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("starlette")

from served_models import Server, serve

from cpumoe.generation.api_requests import ChatRequest, CompletionRequest, ResponsesRequest

EXAMPLES = int(os.environ.get("CPUMOE_FUZZ_EXAMPLES", "60"))
BOUNDED = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with serve(str(folder), "--scheme", "w4a8-g32", "--name", "tiny") as server:
        yield server


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
KINDS = (ChatRequest, CompletionRequest, ResponsesRequest)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields} | {"chat_template", "padding"})
AWKWARD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-50, 1e-320, 0.5, -0.0, "", "\x00", "\x1b[2J", "x" * 5000]
    ),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(-5, 400), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.sampled_from([*FIELDS, "type", "max_length"]), st.integers() | st.text(), max_size=3),
    st.just([[[[[[[[{}]]]]]]]]),
    st.just({"0" * 20 + "999999": 1}),
)


def check(status: int, reply: Any) -> None:
    assert status == 200 or 400 <= status < 500, (status, reply)
    if status != 200:
        assert reply.keys() == {"error"} and reply["error"]["message"] and "Traceback" not in str(reply)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_without_damage_are_answered(server: Server, path: str) -> None:
    """Else the fuzzers below would see errors alone."""
    assert server.call(path, {"model": "tiny", **BODIES[path]})[0] == 200


@given(st.sampled_from(sorted(BODIES)), st.dictionaries(st.sampled_from(FIELDS), AWKWARD, min_size=1, max_size=3))
@BOUNDED
def test_awkward_fields(server: Server, path: str, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", **BODIES[path], **changes}
    if body.get("stream") is True:
        body["stream"] = False  # a stream is no JSON
    check(*server.call(path, body))
    assert server.call("/health") == (200, {"status": "ok"})


@given(st.sampled_from(sorted(BODIES)), st.data())
@BOUNDED
def test_damaged_json(server: Server, path: str, data: st.DataObject) -> None:
    text = bytearray(json.dumps({"model": "tiny", **BODIES[path]}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not text:
            break
    check(*server.call(path, bytes(text)))
    assert server.call("/health") == (200, {"status": "ok"})


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nhost: "]),
)
@BOUNDED
def test_what_is_no_http(server: Server, noise: bytes, beginning: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as connection:
        connection.sendall(beginning + noise)
    assert server.call("/health") == (200, {"status": "ok"})
