"""The answers to a request: its jobs in the engine, and the bodies of chat and text completions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cpumoe.generation.api_requests import ApiError
from cpumoe.generation.choice import Choice
from cpumoe.generation.engine import Engine
from cpumoe.generation.text import Delta, ToolCall
from cpumoe.generation.token_text import TokenText, TokenTexts
from cpumoe.steps.request import ENDING, Failure, Finish, Job
from cpumoe.steps.sampling import Sampling, Token

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ITEMS_AT_ONCE = 16  # tokens that are made text of before other connections have their turn


class Answering:
    """The choices of one request while the engine works on them. ``on_end`` is called when nobody waits any more."""

    def __init__(
        self,
        engine: Engine,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        ends: frozenset[int],
        samplings: Sequence[Sampling],
        *,
        n: int,
        on_end: Callable[[], None],
    ) -> None:
        """``prompts``, ``lengths`` and ``samplings`` are per choice; each prompt has ``n`` of them, side by side."""
        self.choices = list(choices)
        self._n = n
        self._prompt_tokens = sum(map(len, prompts)) // n
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, Token | Finish | Failure]] = asyncio.Queue()
        self._on_end = on_end
        self._ended = False
        loop = asyncio.get_running_loop()
        self._jobs = []
        for index, (prompt, length, sampling) in enumerate(zip(prompts, lengths, samplings, strict=True)):

            def deliver(item: Token | Finish | Failure, index: int = index) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the token
                    loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

            self._jobs.append(Job(prompt, length, ends, sampling, deliver))
        for job in self._jobs:
            engine.add(job)

    async def deltas(self) -> AsyncIterator[tuple[Choice, list[Token], Delta]]:
        """What each token adds to its choice, and at the end the text held back. Raises ApiError on failure."""
        open_choices = len(self.choices)
        for count in itertools.count(1):
            if open_choices == 0:
                return
            if count % _ITEMS_AT_ONCE == 0:
                await asyncio.sleep(0)  # items that are there already come without letting other connections run
            index, item = await self._queue.get()
            choice = self.choices[index]
            if choice.finish is not None:
                continue  # this token was already on its way when a stop string was found
            if isinstance(item, Failure):
                raise ApiError(503 if item.sentence == ENDING else 500, item.sentence)
            if isinstance(item, Token):
                yield choice, [item], choice.add(item)
                if choice.finish is not None:
                    self._engine.cancel(self._jobs[index])
            else:
                yield choice, [], choice.end(item)
            open_choices -= choice.finish is not None

    async def finished(self) -> None:
        async for _ in self.deltas():
            pass

    def end(self) -> None:
        """Tells the engine that nobody waits any more. May be called more than once."""
        if self._ended:
            return
        self._ended = True
        for choice, job in zip(self.choices, self._jobs, strict=True):
            if choice.finish is None:
                self._engine.cancel(job)
        self._on_end()

    def usage(self) -> Usage:
        cached = [job.cached_tokens for job in self._jobs]
        # The answers to one prompt follow each other. The first one to be computed finds least of it in the cache.
        of_prompts = [cached[first : first + self._n] for first in range(0, len(cached), self._n)]
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=sum(map(min, of_prompts)),
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. Each prompt counts once, ``cached_tokens`` are those found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class _Bodies:
    """Bodies of one of the two APIs: what they have in common."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool) -> None:
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts = texts
        self._logprobs = logprobs

    def usage(self, answering: Answering) -> dict[str, Any]:
        return {**self._chunk_of([]), "usage": answering.usage().to_json()}

    def _whole_of(self, choices: list[dict[str, Any]], answering: Answering) -> dict[str, Any]:
        usage = answering.usage().to_json()
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}


class ChatFormat(_Bodies):
    """Bodies of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, answering: Answering) -> dict[str, Any]:
        choices = []
        for choice in answering.choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.content or None, "refusal": None}
            if not choice.tool_calls:
                message["content"] = choice.content
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.tool_calls:
                message["tool_calls"] = [_tool_call_json(call) for call in choice.tool_calls]
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "finish_reason": choice.finish,
                    "logprobs": self._logprobs_of(choice.tokens),
                }
            )
        return self._whole_of(choices, answering)

    def beginning(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, [])

    def piece(self, choice: Choice, tokens: list[Token], delta: Delta) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if delta.content:
            out["content"] = delta.content
        if delta.reasoning:
            out["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            first = len(choice.tool_calls) - len(delta.tool_calls)
            out["tool_calls"] = [
                {"index": first + n, **_tool_call_json(call)} for n, call in enumerate(delta.tool_calls)
            ]
        return self._chunk(choice, out, tokens)

    def _chunk(self, choice: Choice, delta: dict[str, Any], tokens: list[Token]) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "delta": delta,
            "finish_reason": choice.finish,
            "logprobs": self._logprobs_of(tokens),
        }
        return self._chunk_of([entry])

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._texts.of(token)
            return {
                "token": text.label,
                "logprob": logprob,
                "bytes": None if text.bytes is None else list(text.bytes),
            }

        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _tool_call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class CompletionFormat(_Bodies):
    """Bodies of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool, echoes: Sequence[str]) -> None:
        super().__init__(model, texts, logprobs=logprobs)
        self._echoes = echoes  # the text that each choice begins with
        self._lengths: dict[int, int] = {}  # of the text of each choice up to the next token
        self._held: dict[int, bytes] = {}  # what follows it: the unfinished characters that each choice holds back

    def whole(self, answering: Answering) -> dict[str, Any]:
        choices = [
            self._entry(choice, self._echoes[choice.index] + choice.content, choice.tokens)
            for choice in answering.choices
        ]
        return self._whole_of(choices, answering)

    def beginning(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            if self._echoes[choice.index]:
                yield self._chunk(choice, self._echoes[choice.index], [])

    def piece(self, choice: Choice, tokens: list[Token], delta: Delta) -> dict[str, Any]:
        return self._chunk(choice, delta.content, tokens)

    def _chunk(self, choice: Choice, text: str, tokens: list[Token]) -> dict[str, Any]:
        return self._chunk_of([self._entry(choice, text, tokens)])

    def _entry(self, choice: Choice, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "finish_reason": choice.finish,
            "logprobs": self._logprobs_of(choice, tokens),
        }

    def _logprobs_of(self, choice: Choice, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        texts = [self._texts.of(token.id) for token in tokens]
        pieces = choice.pieces[-len(tokens) :] if tokens else []
        return {
            "tokens": [text.key for text in texts],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [self._offset(choice.index, piece, text) for piece, text in zip(pieces, texts, strict=True)],
        }

    def _likeliest(self, token: Token) -> dict[str, float | None]:
        """The likeliest tokens and the chosen one, which makes one entry more where it is not among them."""
        out: dict[str, float | None] = {}
        for other, logprob in token.likeliest:
            out.setdefault(self._texts.of(other).key, logprob)
        return {**out, self._texts.of(token.id).key: token.logprob}

    def _offset(self, index: int, piece: str, token: TokenText) -> int:
        """Where a token begins in the answer's text; for a part of a character, where that character is.

        Args:
            index: of the choice.
            piece: the text that the token has finished. It is empty for tokens that are not shown. It may begin with
                unfinished characters of the tokens before, which were held back.
            token: the text and the bytes of the token alone.
        """
        begin, held = self._lengths.get(index, 0), self._held.get(index, b"")
        self._lengths[index] = begin + len(piece)
        if token.bytes is None or (token.is_whole and _REPLACEMENT not in token.text):
            self._held[index] = b"" if piece else held
            is_shown = token.text and piece.endswith(token.text)
            return begin + (len(piece) - len(token.text) if is_shown else _characters(held))
        self._held[index] = _unfinished(held + token.bytes, piece)
        return begin + _characters(held + token.bytes[:1]) - 1


def _characters(text: bytes) -> int:
    """Return the number of characters, invalid ones included."""
    return len(text.decode(errors="replace"))


def _unfinished(text: bytes, piece: str) -> bytes:
    """Return the end of a text that was held back when ``piece`` was shown: invalid bytes after the last character."""
    if piece.endswith(_REPLACEMENT):  # they were too many, and all were shown
        return b""
    last = text.decode(errors="replace").rstrip(_REPLACEMENT)[-1:]
    return text.rpartition(last.encode())[2] if last and piece else text
