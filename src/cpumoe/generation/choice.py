"""One answer while it is generated: from tokens to reasoning, content and tool calls, up to a stop string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cpumoe.generation.stop_strings import StopAutomaton, StopStrings
from cpumoe.generation.text import Delta, PlainMessage, StructuredMessage, TextPieces, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cpumoe.steps.request import Finish
    from cpumoe.steps.sampling import Token


@dataclass
class Section:
    """Reasoning or content that was written without a break."""

    kind: Literal["reasoning", "content"]
    text: str


class Choice:
    """One of the answers to a request, as far as it is generated.

    Attributes:
        sections: reasoning and content in the order in which they were written.
        reasoning_tokens: how many tokens were spent on reasoning, its marks included.
        pieces: the text that each token has finished; only where log probabilities are wanted.
    """

    def __init__(
        self,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        stops: StopAutomaton,
        message: PlainMessage | StructuredMessage,
        ends: frozenset[int],
    ) -> None:
        self.index = index
        self.tokens: list[Token] = []
        self.pieces: list[str] = []
        self.sections: list[Section] = []
        self.tool_calls: list[ToolCall] = []
        self.reasoning_tokens = 0
        self.finish: str | None = None
        self._unattributed = 0  # tokens that may be the beginning of a mark
        self._pieces = TextPieces(tokenizer, special_tokens=message.special_tokens)
        self._message = message
        self._stops = StopStrings(stops)
        self._ends = ends

    @property
    def content(self) -> str:
        return "".join(section.text for section in self.sections if section.kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(section.text for section in self.sections if section.kind == "reasoning")

    def add(self, token: Token) -> Delta:
        self.tokens.append(token)
        piece = "" if token.id in self._ends else self._pieces.add([token.id])
        if token.logprob is not None:
            self.pieces.append(piece)
        if token.id in self._ends:
            return Delta()
        was_reasoning = self._message.in_reasoning
        delta = self._message.add(piece)
        self._unattributed += 1
        if was_reasoning or self._message.in_reasoning:
            self.reasoning_tokens += self._unattributed
        if was_reasoning or self._message.in_reasoning or delta:
            self._unattributed = 0
        delta = self._appended(delta)
        if self._stops.found:
            self.finish = "stop"
        return delta

    def end(self, finish: Finish) -> Delta:
        delta = self._appended(self._message.add(self._pieces.rest()))
        last = self._appended(self._message.rest(is_cut=finish == "length"))
        held_back = "" if self._stops.found else self._stops.rest()
        self._append("content", held_back)
        self.finish = "stop" if self._stops.found else "tool_calls" if self.tool_calls else finish
        return Delta(
            delta.content + last.content + held_back,
            delta.reasoning + last.reasoning,
            delta.tool_calls + last.tool_calls,
        )

    def _appended(self, delta: Delta) -> Delta:
        """Adds a delta to the answer, up to the first stop string; returns the part that was added."""
        delta = Delta(self._stops.add(delta.content), delta.reasoning, delta.tool_calls)
        self._append("reasoning", delta.reasoning)
        self._append("content", delta.content)
        self.tool_calls += delta.tool_calls
        return delta

    def _append(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        if not self.sections or self.sections[-1].kind != kind:
            self.sections.append(Section(kind, ""))
        self.sections[-1].text += text
