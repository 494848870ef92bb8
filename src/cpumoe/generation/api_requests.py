"""The bodies of requests: every field that is supported, with its range. Any other field is rejected by name.

A field that is not supported may still be sent with a value that asks for what happens anyway (``"store": false``).
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from cpumoe.generation.request_fields import FAST, Hints, Only, Part

_MAX_STOPS = 16
_MAX_CHOICES = 64
_MAX_NAME = 256

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Tokens = Annotated[list[int], FAST]


class ApiError(Exception):
    """A refusal in the words of the OpenAI API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds  # after which the client may ask again

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Body(Hints):
    """The fields that all three kinds of requests share."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class ObfuscationOptions(Part):
    include_obfuscation: Annotated[Any, Only(False)] = None


class StreamOptions(ObfuscationOptions):
    include_usage: bool = False


class _CompletionBody(_Body):
    """The fields that chat and text completions share."""

    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None  # 0 means all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> _CompletionBody:
        if self.include_usage and not self.stream:
            raise ValueError("stream_options.include_usage has a meaning with stream only")
        return self


# ---- chat ----------------------------------------------------------------------------------------------------------


class TextPart(Part):
    """Text inside a list of contents; pictures and sound are refused by their type."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    # Parts of an earlier answer have these fields, always empty. They are accepted so that it can be sent back.
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    logprobs: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    prompt_cache_breakpoint: dict[str, str] | None = None  # a hint where a prefix ends; all prefixes are cached


Content = str | Annotated[list[TextPart], FAST]


class FunctionCall(Part):
    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    arguments: str


class MessageToolCall(Part):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # that of a streamed answer


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FAST] | None = None
    tool_call_id: str | None = None
    # Answers of the assistant have these fields, always empty.
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    refusal: Annotated[Any, Only("")] = None

    @property
    def text(self) -> str | None:
        return _joined(self.content)

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Message:
        has_reasoning = self.role == "assistant" and self.reasoning_content is not None
        if self.content is None and not self.tool_calls and not has_reasoning:
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of role {self.role!r}; those of the assistant may have them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of role 'tool', which need it")
        return self


class Function(Part):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]+$", max_length=_MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Any, Only(False)] = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class ChatRequest(_CompletionBody):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # the new name of max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], FAST] = Field(default_factory=list)
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)

    parallel_tool_calls: bool = True
    tool_choice: Literal["auto", "none"] | None = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None
    reasoning_effort: Annotated[Any, Only("medium")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    prediction: dict[str, Any] | None = None  # a hint that may make an answer faster, never another one
    audio: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("auto", "none")] = None
    web_search_options: Annotated[Any, Only()] = None  # {} would search, too

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.tool_choice == "none":
            self.tools = []
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs has a meaning with logprobs: true only")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are two names of one thing; send one of them")
        if self.tools and not self.parallel_tool_calls:
            raise ValueError("parallel_tool_calls is False; with tools only True is served")
        return self

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# ---- text ----------------------------------------------------------------------------------------------------------


class CompletionRequest(_CompletionBody):
    prompt: str | Tokens | Annotated[list[str], FAST] | Annotated[list[Tokens], FAST]
    max_tokens: Annotated[int, Field(ge=1)] = 16  # as OpenAI has it
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: Annotated[Any, Only("")] = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if isinstance(self.prompt, list) and not self.prompt:
            raise ValueError("prompt is an empty list; expected a text, a list of tokens, or a list of either")
        if self.best_of not in (None, 1, self.n):
            raise ValueError(f"best_of is {self.best_of}; only 1 or the value of n is served")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: the prompt's own probabilities are not computed")
        if self.n * len(self.prompts) > _MAX_CHOICES:
            raise ValueError(
                f"{len(self.prompts)} prompts with n={self.n}; {_MAX_CHOICES} answers at most are accepted"
            )
        return self

    @property
    def has_one_prompt(self) -> bool:
        """Whether ``prompt`` is not a list of prompts."""
        return isinstance(self.prompt, str) or isinstance(self.prompt[0], int)  # the first entry shows the type of all

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        return [self.prompt] if self.has_one_prompt else self.prompt  # type: ignore[return-value, list-item]


# ---- responses -----------------------------------------------------------------------------------------------------


class InputMessage(Part):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    # Items of an earlier answer have these fields. They are accepted so that it can be sent back.
    id: str | None = None
    status: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class SummaryPart(Part):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(Part):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Part):
    """The reasoning of an earlier answer, which comes before the message that it led to."""

    type: Literal["reasoning"]
    id: str | None = None
    status: str | None = None
    summary: Annotated[list[SummaryPart], FAST] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], FAST] = Field(default_factory=list)
    encrypted_content: Annotated[Any, Only("")] = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


def _item_type(item: Any) -> Any:
    """Return the type of an input item; a message may leave it out."""
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if given is None else given


Item = Annotated[
    Annotated[InputMessage, Tag("message")] | Annotated[ReasoningItem, Tag("reasoning")], Discriminator(_item_type)
]


class ReasoningOptions(Part):
    effort: Annotated[Any, Only("medium")] = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None
    summary: Annotated[Any, Only()] = None
    generate_summary: Annotated[Any, Only()] = None


class TextOptions(Part):
    format: Annotated[Any, Only({"type": "text"})] = None
    verbosity: Annotated[Any, Only("medium")] = None


class ImageOptions(Part):
    context_compression: Annotated[Any, Only("auto")] = None


class ResponsesRequest(_Body):
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool = True  # there are no tools
    reasoning: ReasoningOptions | None = None
    stream_options: ObfuscationOptions | None = None
    text: TextOptions | None = None
    image: ImageOptions | None = None
    access_programs: Annotated[Any, Only()] = None
    background: Annotated[Any, Only(False)] = None
    context_management: Annotated[Any, Only([])] = None
    conversation: Annotated[Any, Only()] = None
    include: Annotated[Any, Only([])] = None
    max_tool_calls: Annotated[Any, Only()] = None
    previous_response_id: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    tool_choice: Annotated[Any, Only("auto", "none")] = None
    tools: Annotated[Any, Only([])] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    truncation: Annotated[Any, Only("disabled")] = None

    @property
    def messages(self) -> list[Message]:
        """The conversation as chat messages. Reasoning becomes a part of the assistant's message after it."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        reasoning = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):
                reasoning += item.text
                continue
            if reasoning and item.role != "assistant":  # an answer that was cut before its message began
                messages.append(Message(role="assistant", content="", reasoning_content=reasoning))
                reasoning = ""
            text = _joined(item.content) or ""
            messages.append(Message(role=item.role, content=text, reasoning_content=reasoning or None))
            reasoning = ""
        if reasoning:
            messages.append(Message(role="assistant", content="", reasoning_content=reasoning))
        return messages


def _joined(content: Content | None) -> str | None:
    return content if content is None or isinstance(content, str) else "".join(part.text for part in content)


Body = TypeVar("Body", bound=_Body)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Parses the request in ``data``; raises ApiError that says what is wrong with it."""
    try:
        body = from_json(data)
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_shown(body)}; a JSON object is accepted")
    try:
        return kind.model_validate(body)
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
    # A field may have several alternative types. The one whose validation went furthest is taken for the one that was
    # meant: deepest in the body, at the last position of a list, and then one whose type was right.
    of_field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=lambda e: (*_reached(e["loc"]), not e["type"].endswith("_type")))
    param = _field_name(first["loc"])
    message = _text_of(first).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"{param} is not served"
    elif first["type"] == "missing":
        message = f"{param} is needed"
    elif first["type"] == "unsupported":
        message = f"{param} is {_shown(first['input'])}; {message}"
    elif first["type"] == "union_tag_invalid":
        param += ".type"
        message = f"{param} is {_shown(first['ctx']['tag'])}; expected {first['ctx']['expected_tags']}"
    elif first["type"] == "value_error":
        message = f"{param}: {message}" if param else message
        param = param or (word if (word := message.split()[0].partition(".")[0]) in kind.model_fields else "")
    else:
        alike = [e for e in of_field if e["type"].endswith("_type") and _reached(e["loc"]) == _reached(first["loc"])]
        if first in alike:  # no alternative has the type of the value
            kinds = dict.fromkeys(_text_of(e).partition("should be a ")[2] or _text_of(e) for e in alike)
            message = f"input should be a {' or a '.join(kinds)}" if len(kinds) > 1 else message
        message = f"{param} is {_shown(first['input'])}: {message[0].lower()}{message[1:]}"
    raise ApiError(400, message, param=param or None)


def _reached(location: tuple[str | int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how far validation went: the depth, and the positions in lists."""
    return len(location), tuple(part for part in location if isinstance(part, int))


def _text_of(error: ErrorDetails) -> str:
    if error["type"] == "model_type":
        return "input should be a valid object"
    return error["msg"].replace(" after validation", "")  # that is when pydantic counts the items of a list


# Words that pydantic puts into the location of an error besides the names of fields and positions.
_ALTERNATIVES = ("str", "int", "bool", "constrained-str")
_ITEM_TAGS = ("message", "reasoning")  # after the position of an item


def _field_name(location: tuple[str | int, ...]) -> str:
    """Return the name of a field as clients write it, such as ``messages.0.content``."""
    names = []
    for before, part in zip((None, *location), location, strict=False):
        is_tag = part in _ITEM_TAGS and isinstance(before, int)
        if not (is_tag or part in _ALTERNATIVES or "[" in str(part)):
            names.append(str(part))
    return ".".join(names)


def _shown(value: object) -> str:
    text = reprlib.repr(value)  # shortens long lists
    return text if len(text) <= 80 else f"{text[:77]}..."
