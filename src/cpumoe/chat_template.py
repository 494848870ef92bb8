"""Chat templates: the only module that reads and renders the template of a tokenizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

# Variables that every template gets.
_GIVEN = {"messages", "tools", "documents", "raise_exception", "strftime_now"}


class ChatTemplate:
    """The chat template of a tokenizer of transformers, which may have none.

    A template is a program that comes with the model: rendering may take long, and fail in any way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template, or several."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def source(self, tools: Tools = ()) -> str:
        """Return the template for conversations with these tools, empty if the tokenizer has none for them."""
        try:
            return str(self._tokenizer.get_chat_template(tools=list(tools) or None))
        except ValueError:
            return ""

    def has_variable(self, name: str, tools: Tools = ()) -> bool:
        """Return whether a template reads this variable, which is neither always there nor an option of rendering."""
        options = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        if not name.isidentifier() or name in options | _GIVEN | set(self._tokenizer.special_tokens_map):
            return False
        return re.search(rf"\b{name}\b", self.source(tools)) is not None

    def prompt(self, messages: Messages, tools: Tools = (), variables: Mapping[str, Any] = {}) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins. Raise ValueError as :meth:`text` does."""
        options = {"tools": list(tools) or None, "add_generation_prompt": True, "return_dict": False}
        tokens = self._rendered(messages, **options, **variables)
        return [token for token in tokens if isinstance(token, int)]

    def text(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text. Raise ValueError if there is no template, or if it does not take it."""
        return str(self._rendered(messages, tokenize=False, add_generation_prompt=add_generation_prompt))

    def _rendered(self, messages: Messages, **options: Any) -> Any:
        if not self.is_there:
            raise ValueError(
                "this model's tokenizer has no chat template; cpumoe generate and /v1/completions take plain text"
            )
        try:
            return self._tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except Exception as problem:
            raise ValueError(f"the model's chat template refuses this conversation: {problem}") from problem
