"""Tokens to text, piece by piece: unfinished characters, stop strings, and the parts of an assistant's message."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("cpumoe")

# Stands for bytes that are no character yet; the rest of it may be in the next token.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns tokens into text as they come, so that the pieces joined are the text of all tokens.

    A character may be spread over several tokens. Whatever ends in an unfinished one is held back until it is finished
    or until ``rest`` is called.
    """

    _WINDOW = 64  # tokens decoded again for each new one, at most while all characters are finished
    _LONGEST = 256  # tokens decoded again in any case
    _CONTEXT = 8  # tokens kept before a cut, since what a token means depends on its neighbours

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens  # whether they are part of the text
        self._tokens: list[int] = []
        self._shown = 0  # characters of these tokens' text that have been given out

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
        if len(self._tokens) >= self._LONGEST:  # bytes that never become characters: decoding them again has no end
            piece += self.rest()
        return piece

    def rest(self) -> str:
        """What was held back, with replacement characters for what never became one."""
        piece = self._decode(self._tokens)[self._shown :]
        self._tokens, self._shown = [], 0
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=not self._special_tokens)
        assert isinstance(text, str)
        return text


class StopStrings:
    """Passes text on up to the first of some strings, whatever pieces it comes in.

    The string that is complete first ends the text; neither it nor anything behind it is passed on. Whatever may become
    such a string is held back until it does not.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What can be shown by now; nothing more after a stop string was found."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the client's tools; ``arguments`` is JSON."""

    name: str
    arguments: str


@dataclass
class Delta:
    """What a piece of an answer adds to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class PlainMessage:
    """A message that is all content."""

    special_tokens = False

    def add(self, piece: str) -> Delta:
        return Delta(content=piece)

    def rest(self) -> Delta:
        return Delta()


class StructuredMessage:
    """A message whose reasoning and tool calls are told apart by the marks that its family of models uses.

    Args:
        template: transformers' ``response_template``: the marks of the family.
        prompt: the text that the model continues. It may have begun the message already, with an opening mark of the
            reasoning for instance.
        tools: the client's tools, whose schemas say how arguments are to be read.
    """

    special_tokens = True  # they are the marks

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = dict(template["fields"])
        if not tools:  # then a call is a text like any other
            fields.pop("tool_calls", None)
        spec = load_response_template({**template, "fields": fields})
        begun = spec.truncate_past_last_anchor(prompt) or ""
        # Without its anchor the parser would take the whole prompt for the beginning of the answer; and white space
        # that the template has put behind its marks is no part of it either.
        at = len(prompt) - len(begun)
        prefix = prompt[:at] + begun.rstrip() if at > 0 and begun != prompt else ""
        self._parser = ResponseParser(spec, prefix=prefix, tools=[dict(tool) for tool in tools] or None)
        self._call = ""  # what was written of a tool call that has not ended
        self._calling = False
        self._broken = False

    def add(self, piece: str) -> Delta:
        if self._broken:
            return Delta(content=piece)
        self._call += piece
        try:
            return self._read(self._parser.feed(piece))
        except Exception as problem:  # of whatever a model may write between marks
            return self._give_up(problem)

    def rest(self) -> Delta:
        if self._broken:
            return Delta()
        try:
            delta = self._read(self._parser.finalize()[1])
        except Exception as problem:
            return self._give_up(problem)
        if self._calling:  # cut in the middle of a call
            delta.content += self._call
        return delta

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Delta:
        delta = self._delta(events)
        for event in events:
            if event.get("field") == "tool_calls":
                self._calling = event["type"] != "region_close"
        if not self._calling:  # what the parser holds back may be the beginning of a call
            self._call = self._parser._buffer[self._parser._pos :]
        elif delta.content:  # was written before the call began
            self._call = self._call.partition(delta.content)[2]
        return delta

    def _give_up(self, problem: Exception) -> Delta:
        """A model may write marks that do not fit; what it wrote is given as it is rather than lost."""
        _log.warning("an answer does not keep to its model's format (%s); it is given as it is", problem)
        self._broken = True
        return Delta(content=self._call)

    @staticmethod
    def _delta(events: Iterable[Mapping[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            kind, region = event["type"], event.get("field")
            if kind == "region_chunk" and not event.get("dirty"):  # dirty ones are read as a whole when they close
                text = event.get("text") or ""
                if region == "content":
                    delta.content += text
                elif region in ("reasoning_content", "thinking", "reasoning"):
                    delta.reasoning += text
            elif kind == "region_close" and region == "tool_calls":
                function = event["value"]["function"]
                name, arguments = function["name"], function.get("arguments", {})
                if not isinstance(name, str):
                    raise ValueError(f"a call of {name!r:.80}, which is no name")
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                delta.tool_calls += (ToolCall(name, text),)
        return delta
