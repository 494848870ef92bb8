"""Bodies and events of /v1/responses: reasoning and messages as items, in the order in which they are written."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from cpumoe.generation.api_requests import ApiError, ResponsesRequest

if TYPE_CHECKING:
    from cpumoe.generation.answers import Answering

Event = dict[str, Any]


class ResponsesFormat:
    """Makes the body or the events of the response to one request."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
        }

    def whole(self, answering: Answering) -> dict[str, Any]:
        [choice] = answering.choices
        items = [_Item(section.kind, section.text) for section in choice.sections]
        return self._ended(answering, items or [_Item("content")])  # an empty answer is a message too

    def _ended(self, answering: Answering, items: list[_Item]) -> dict[str, Any]:
        status = self._status(answering)
        usage = answering.usage()
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*(item.to_json("completed") for item in items[:-1]), items[-1].to_json(status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    @staticmethod
    def _status(answering: Answering) -> str:
        """The status of the response and of its last item, once it has ended; the items before are complete."""
        return "incomplete" if answering.choices[0].finish == "length" else "completed"

    async def events(self, answering: Answering) -> AsyncIterator[Event]:
        """The events of a stream, in order; if something fails, that is the last one."""
        begun: dict[str, Any] = {**self._head, "status": "in_progress", "error": None, "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        count = 0
        async for kind, fields in self._events(answering, begun):
            yield {"type": f"response.{kind}", "sequence_number": count, **fields}
            count += 1

    async def _events(self, answering: Answering, begun: dict[str, Any]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        yield "created", {"response": begun}
        yield "in_progress", {"response": begun}
        items: list[_Item] = []
        try:
            async for _, _, delta in answering.deltas():
                for kind, text in (("reasoning", delta.reasoning), ("content", delta.content)):
                    if not text:
                        continue
                    if not items or items[-1].kind != kind:
                        for event in _turn(items, kind):
                            yield event
                    yield items[-1].add(text, len(items) - 1)
        except ApiError as problem:
            error = {"code": "server_error", "message": str(problem)}
            yield "failed", {"response": {**begun, "status": "failed", "error": error}}
            return
        if not items:  # an empty answer is a message too
            for event in _turn(items, "content"):
                yield event
        for event in items[-1].end(len(items) - 1, self._status(answering)):
            yield event
        whole = self._ended(answering, items)
        yield whole["status"], {"response": whole}


def _turn(items: list[_Item], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ends the item that is being written, if there is one, and begins the next one."""
    if items:
        yield from items[-1].end(len(items) - 1, "completed")
    items.append(_Item(kind))
    yield from items[-1].begin(len(items) - 1)


class _Item:
    """One item of the output: reasoning, or content in a message."""

    def __init__(self, kind: str, text: str = "") -> None:
        self.kind = kind
        self.text = text
        self.id = f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}"

    def to_json(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self.text)]
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}

    def begin(self, index: int) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "output_item.added", {"output_index": index, "item": self.to_json("in_progress")}
        yield "content_part.added", {**self._place(index), "part": self._part("")}

    def add(self, text: str, index: int) -> tuple[str, dict[str, Any]]:
        self.text += text
        return f"{self._name}.delta", {**self._place(index), "delta": text, **self._logprobs}

    def end(self, index: int, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield f"{self._name}.done", {**self._place(index), "text": self.text, **self._logprobs}
        yield "content_part.done", {**self._place(index), "part": self._part(self.text)}
        yield "output_item.done", {"output_index": index, "item": self.to_json(status)}

    @property
    def _name(self) -> str:
        return "reasoning_text" if self.kind == "reasoning" else "output_text"

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {} if self.kind == "reasoning" else {"logprobs": []}

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
