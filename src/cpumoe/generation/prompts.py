"""Turns the messages of a request into the tokens that a model continues."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpumoe.chat_template import ChatTemplate, Tools
from cpumoe.generation.answer_marks import AnswerMarks
from cpumoe.generation.api_requests import ApiError, Message, Tool
from cpumoe.generation.text import PlainMessage, StructuredMessage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_NUMBER, _MAX_TEXT = 1_000_000, 1000  # limits for a variable of the template that a request sets


class Prompts:
    """Renders conversations with the model's own chat template, and makes the readers of its answers.

    A request can neither replace the template nor set options of the tokenizer. Methods of this class may take long and
    must not be called on the thread that answers connections.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, marks: AnswerMarks) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = model.config.get_text_config().vocab_size
        self._marks = marks
        self._template = ChatTemplate(tokenizer)

    def of_text(self, text: str | Sequence[int], param: str = "prompt") -> list[int]:
        """Return the tokens of a text, which may be tokens already; ``param`` is its name in the request."""
        tokens = self._tokenizer(text)["input_ids"] if isinstance(text, str) else text
        return self._checked(list(tokens), param)

    def of_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), variables: Mapping[str, bool | int | str] = {}
    ) -> list[int]:
        """The tokens of a conversation up to where the answer begins; ``variables`` are variables of the template."""
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        source = self._template.source(listed)
        if tools and source and (self._marks.template is None or not re.search(r"\btools\b", source)):
            raise ApiError(400, "tools is not served: this model's chat template has no place for them", param="tools")
        self._check_variables(listed, variables)
        try:
            given = [self._for_template(message, source) for message in messages]
            return self._checked(self._template.prompt(given, listed, variables), "messages")
        except ValueError as problem:
            raise ApiError(400, str(problem), param="messages") from None

    def message(self, prompt: Sequence[int], tools: Sequence[Tool] = ()) -> PlainMessage | StructuredMessage:
        """The reader of an answer to ``prompt``, which is a rendered chat."""
        return self._marks.message(prompt, [tool.model_dump(exclude_none=True) for tool in tools])

    def _check_variables(self, tools: Tools, variables: Mapping[str, bool | int | str]) -> None:
        for name, value in variables.items():
            param = f"chat_template_kwargs.{name:.80}"
            if not self._template.has_variable(name, tools):
                raise ApiError(400, f"{param} is not a variable of this model's chat template", param=param)
            if abs(value) > _MAX_NUMBER if isinstance(value, int) else len(value) > _MAX_TEXT:
                raise ApiError(
                    400,
                    f"{param}: numbers up to {_MAX_NUMBER} and texts of up to {_MAX_TEXT} characters are accepted",
                    param=param,
                )

    @staticmethod
    def _for_template(message: Message, template: str) -> dict[str, Any]:
        # Most templates know only the older name of this role.
        role = "system" if message.role == "developer" and "developer" not in template else message.role
        out: dict[str, Any] = {"role": role, "content": message.text or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                out[name] = value
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    # Templates iterate over the arguments, so they must not be a string.
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        return out

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        if not tokens:
            raise ApiError(400, f"{param} is empty for this tokenizer; there is nothing to continue", param=param)
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ApiError(
                400, f"{param} has tokens outside of the model's vocabulary: 0 to {self._vocabulary - 1}", param=param
            )
        return tokens


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ApiError(400, f"the arguments of a tool call are not JSON: {text:.80}", param="messages") from None
