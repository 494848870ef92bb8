"""Turns tokens into text piece by piece: unfinished characters, and the parts of a message."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("cpumoe")

# Takes the place of bytes that are not a whole character; the next token may complete it.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns tokens into text as they come. All pieces joined are the text of all tokens.

    A character may be spread over several tokens. An unfinished character is held back until it is finished or until
    ``rest`` is called.
    """

    _WINDOW = 64  # the most tokens that are decoded again for each new one, as long as all characters are finished
    _LONGEST = 256  # the most tokens that are decoded again in any case
    _CONTEXT = (
        8  # tokens that are kept when older ones are dropped, since the text of a token depends on its neighbours
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens  # whether special tokens are part of the text
        self._tokens: list[int] = []
        self._shown = 0  # characters of the text of these tokens that were returned already

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        finished = text.rstrip(_UNFINISHED)
        piece = finished[self._shown :]
        self._shown += len(piece)
        if len(self._tokens) >= self._WINDOW and self._shown == len(text):
            context = self._tokens[-self._CONTEXT :]
            context_text = self._decode(context)
            if _UNFINISHED not in context_text and text.endswith(context_text):
                self._tokens, self._shown = context, len(context_text)
        if len(self._tokens) >= self._LONGEST:  # bytes that never become a character would be decoded again for ever
            piece += self.rest()
        return piece

    def rest(self) -> str:
        """The text that was held back, with replacement characters for unfinished characters."""
        piece = self._decode(self._tokens)[self._shown :]
        self._tokens, self._shown = [], 0
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=not self._special_tokens)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the client's tools; ``arguments`` is JSON."""

    name: str
    arguments: str


@dataclass
class Delta:
    """What a piece of an answer adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class PlainMessage:
    """A message that has content only."""

    special_tokens = False
    in_reasoning = False

    def add(self, piece: str) -> Delta:
        return Delta(content=piece)

    def rest(self, *, is_cut: bool = False) -> Delta:
        return Delta()


_REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of templates


class StructuredMessage:
    """A message with reasoning and tool calls, which are recognised by the marks that its family of models uses.

    Args:
        template: transformers' ``response_template``, which has the marks of the family.
        prompt: the text that the model continues. It may contain the beginning of the message, such as the opening mark
            of the reasoning.
        tools: the client's tools; their schemas say how arguments are to be read.
        marks: special tokens that are never part of a text, also where a message does not keep to the format. With
            them, calls that cannot be delivered are content without marks; else they are content as written.
    """

    special_tokens = True  # the marks are special tokens

    def __init__(
        self,
        template: Mapping[str, Any],
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        marks: Sequence[str] = (),
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = dict(template["fields"])
        if not tools:  # then a call is text like any other
            fields.pop("tool_calls", None)
        spec = load_response_template({**template, "fields": fields})
        begun = spec.truncate_past_last_anchor(prompt) or ""
        # Without the anchor the parser would take the whole prompt for the beginning of the answer. White space that
        # the template puts after its marks is not part of the answer either.
        at = len(prompt) - len(begun)
        prefix = prompt[:at] + begun.rstrip() if at > 0 and begun != prompt else ""
        self._parser = ResponseParser(spec, prefix=prefix, tools=[dict(tool) for tool in tools] or None)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._call = ""  # the text of a tool call that has not ended
        self._calling = False
        self._broken = False
        self._is_cut = False

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, unless it ends the reasoning."""
        return not self._broken and self._parser._current in _REASONING

    def add(self, piece: str) -> Delta:
        if self._broken:
            return Delta(content=self._without_marks(piece))
        self._call += piece
        try:
            events = self._parser.feed(piece)
        except Exception as problem:  # a model may write anything between marks, and the parser raise anything
            return self._give_up(problem)
        return self._read(events)

    def rest(self, *, is_cut: bool = False) -> Delta:
        """Return what is left at the end of an answer, which may have been cut by its maximum length."""
        if self._broken:
            return Delta()
        self._is_cut = is_cut
        if self._marks is not None and self._marks.search(self._held_back()) and not self._holds_whole_header():
            self._parser._buffer = self._parser._buffer[: self._parser._pos]  # the header of a message was cut
        try:
            _, events = self._parser.finalize()
        except Exception as problem:  # as above
            return self._give_up(problem)
        delta = self._read(events)
        if self._calling and not self._broken:  # the answer was cut in the middle of a call
            delta.content += self._call
        return delta

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Delta:
        try:
            delta = self._delta(events)
        except _MalformedCall as problem:
            return self._give_up(problem)
        for event in events:
            if event.get("field") == "tool_calls":
                self._calling = event["type"] != "region_close"
        if not self._calling:  # the text that the parser holds back may be the beginning of a call
            self._call = self._held_back()
        elif delta.content:  # it was written before the call began
            self._call = self._call.partition(delta.content)[2]
        return delta

    def _held_back(self) -> str:
        """Return the text that may be the beginning of a mark."""
        held: str = self._parser._buffer[self._parser._pos :]
        return held

    def _holds_whole_header(self) -> bool:
        """Return whether the text that is held back has a whole mark or header, after which nothing came."""
        return self._parser._scan(self._parser._watchlist(), True)[0] is not None

    def _give_up(self, problem: Exception) -> Delta:
        """Passes on what the model wrote as plain content from now on, so that nothing of it is lost."""
        reason = str(problem).partition("\n")[0]  # the lines after it are what the model wrote
        _log.warning("an answer does not keep to its model's format (%.200s); it is given as it is", reason)
        self._broken = True
        return Delta(content=self._without_marks(self._call))

    def _delta(self, events: Iterable[Mapping[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            kind, region = event["type"], event.get("field")
            if kind == "region_chunk" and not event.get("dirty"):  # a dirty one is read as a whole when it closes
                text = self._without_marks(event.get("text") or "")
                if region == "content":
                    delta.content += text
                elif region in _REASONING:
                    delta.reasoning += text
            elif kind == "region_close" and region == "tool_calls":
                if self._marks is None:
                    delta.tool_calls += (_parsed_call(event.get("value")),)
                else:
                    self._add_marked_call(delta, event["value"])
        return delta

    def _add_marked_call(self, delta: Delta, value: dict[str, Any]) -> None:
        """Add a call with arguments in JSON, or if they are cut or malformed, their text as content."""
        function = value["function"]
        text = self._without_marks(function["arguments"])
        try:
            function["arguments"] = json.loads(text if text or self._is_cut else "{}")
            arguments = self._parser._coerce_tool_calls(value)["function"]["arguments"]
            delta.tool_calls += (ToolCall(function["name"], json.dumps(arguments)),)
        except (ValueError, RecursionError) as problem:
            _log.warning("a call of a tool is given as content: its arguments are not JSON: %.200s", problem)
            delta.content += text

    def _without_marks(self, text: str) -> str:
        return text if self._marks is None else self._marks.sub("", text)


class _MalformedCall(Exception):
    """A model wrote a tool call that has not the parts of one."""


def _parsed_call(value: object) -> ToolCall:
    """The call that a model wrote, as the parser of transformers read it."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise _MalformedCall(f"a call of {name!r:.80}, which is no name")
    arguments = function.get("arguments", {})
    try:
        return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (ValueError, TypeError, RecursionError) as problem:  # what the parser made of it need not be JSON
        raise _MalformedCall(f"a call with arguments that are not JSON: {problem}") from None
