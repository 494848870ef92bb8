"""What a model writes around its answers: marks of reasoning and tool calls (harmony too), end-of-turn tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cpumoe.chat_template import ChatTemplate
from cpumoe.generation.text import PlainMessage, StructuredMessage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger("cpumoe")

_TESTED_WITH = "5.22"

# The harmony format of gpt-oss, for which transformers has no template. A message has a channel: analysis (reasoning),
# final, or commentary, which is for tool calls and for what the user is told before them. A recipient ("to=") may stand
# before or after the channel. Messages to a recipient that is not one of the client's functions are content. Nothing
# here is unbounded or backtracks ("+" after a quantifier): after every token the patterns are searched for in whatever
# the model writes.
_SPACE = r"\s{0,16}+"
_WORD = r"\w{1,32}+"
_FUNCTION = rf"{_SPACE}to=functions\.(?P<name>[\w.-]{{1,128}}+)"
_RECIPIENT = rf"{_SPACE}to=[\w.-]{{1,138}}+"
_CONTENT_TYPE = rf"{_SPACE}(?:<\|constrain\|>{_SPACE})?+(?:{_WORD}{_SPACE})?+"
_HARMONY: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": rf"(?:<\|start\|>assistant)?<\|channel\|>analysis{_SPACE}<\|message\|>",
            "close": "<|end|>",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?"
                rf"(?:<\|channel\|>{_WORD}{_FUNCTION}|{_FUNCTION}{_SPACE}<\|channel\|>{_WORD}){_CONTENT_TYPE}<\|message\|>"
            ),
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "text",  # StructuredMessage parses the arguments, and gives them as content if they are not JSON
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "close_pattern": (
                rf"(?:<\|start\|>assistant)?(?:(?:{_RECIPIENT})?{_SPACE}<\|channel\|>{_WORD}(?:{_RECIPIENT})?"
                rf"{_CONTENT_TYPE})?<\|message\|>|<\|end\|>|<\|return\|>|<\|call\|>"
            ),
            "content": "text",
        },
    },
}
_HARMONY_MARKS = (
    "<|start|>assistant",
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
)

_ANSWER = "the answer of cpumoe"  # no template writes this by itself; one may write it in capitals
_QUESTION = {"role": "user", "content": "?"}
_TURN = (_QUESTION, {"role": "assistant", "content": _ANSWER})
_SYSTEM = {"role": "system", "content": "?"}  # some templates demand one, others refuse it
#: A template may leave the last answer open, which somebody may want to be continued.
_CONVERSATIONS = (_TURN, (*_TURN, _QUESTION), (_SYSTEM, *_TURN), (_SYSTEM, *_TURN, _QUESTION))


class AnswerMarks:
    """Reads the answers of one model; the server and ``cpumoe chat`` share it.

    Attributes:
        ends: the tokens that end an answer: those of the generation config, the tokenizer's end-of-sequence token, and
            the special token that the chat template writes after a message of the assistant.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        configured = getattr(model.generation_config, "eos_token_id", None)
        ends = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
        ends.append(self._turn_end())
        self.ends = frozenset(end for end in ends if end is not None)

    @cached_property
    def template(self) -> Mapping[str, Any] | None:
        """transformers' ``response_template`` for this model; None if its answers have no marks that are known.

        The tokenizer's own comes first, then what the chat template shows, then transformers' for the model's family.
        """
        has_own = getattr(self._tokenizer, "response_template", None) is not None
        source = ChatTemplate(self._tokenizer).source()
        if not has_own and all(mark in source for mark in ("<|start|>", "<|channel|>", "<|message|>")):
            return _HARMONY
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError as problem:
            raise _other_transformers(problem) from None
        found: Mapping[str, Any] | None = get_response_template(self._tokenizer, self._model)
        return found

    def message(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> PlainMessage | StructuredMessage:
        """Return the reader of an answer to ``prompt``, which is a rendered chat with these tools."""
        if self.template is None:
            return PlainMessage()
        text = self._tokenizer.decode(list(prompt))
        assert isinstance(text, str)
        marks = _HARMONY_MARKS if self.template is _HARMONY else ()
        return StructuredMessage(self.template, text, tools, marks)

    def _turn_end(self) -> int | None:
        """Return the special token that the chat template writes directly after an answer, if it writes one."""
        template = ChatTemplate(self._tokenizer)
        if not template.source():
            return None
        special = {
            str(token): number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        for messages in _CONVERSATIONS:
            try:
                text = template.text(messages)
                asked = messages[: messages.index(_QUESTION) + 1]
                begin = template.text(asked, add_generation_prompt=True).removeprefix(template.text(asked))
            except ValueError as problem:
                _log.debug("the chat template does not show how an answer ends: %s", problem)
                continue
            _, found, rest = text.lower().rpartition(_ANSWER)
            rest = text[len(text) - len(rest) :].lstrip()
            candidates = (token for token in special if found and rest.startswith(token) and token not in begin)
            if (end := max(candidates, key=len, default=None)) is not None:
                return special[end] if self._ends_answers(end) else None
        return None

    def _ends_answers(self, token: str) -> bool:
        """Return whether a token ends the whole answer, not only a part of it."""
        try:
            return not self._goes_on_after(token)
        except RuntimeError as problem:  # text that nobody reads as a chat can be generated all the same
            _log.info("%r is not known to end answers: %s", token, problem)
            return False

    def _goes_on_after(self, token: str) -> bool:
        """Whether the token only ends a part of an answer, such as its reasoning."""
        try:
            from transformers.utils.chat_parsing.response_templates import load_response_template
        except ImportError as problem:
            raise _other_transformers(problem) from None
        if self.template is None:
            return False
        fields = load_response_template(dict(self.template)).fields
        patterns = [p for name, field in fields.items() if name != "content" for p in (field.open_re, field.close_re)]
        return any(pattern is not None and pattern.fullmatch(token) for pattern in patterns)


def _other_transformers(problem: ImportError) -> RuntimeError:
    import transformers

    return RuntimeError(
        f"reading answers needs transformers {_TESTED_WITH}, this is {transformers.__version__}: {problem}"
    )
