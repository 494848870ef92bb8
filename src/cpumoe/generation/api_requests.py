"""The bodies of requests: every field that is supported, with its range. Any other field is refused by name.

A field that is not supported may still be sent with the value that describes what happens anyway (``"store": false``).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

_MAX_STOPS = 16
_MAX_CHOICES = 64
_MAX_NAME = 256

# Checking a list ends at the first wrong entry: a million errors would take seconds, and block all connections.
FAST = Field(fail_fast=True)

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Tokens = Annotated[list[int], FAST]


class ApiError(Exception):
    """A refusal in the words of the OpenAI API."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    """Any part of a body: types are strict, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        """Drops fields that are null, whatever their name: clients send back answers with null fields of their own."""
        return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


class _Body(_Part):
    """The fields that all three kinds of requests share."""

    #: Fields that may only have these values, because the values describe what happens anyway.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None  # the name of the client's own user, which by definition has no effect

    @classmethod
    def without_neutral_fields(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        """Drops fields that describe what happens anyway; raises ApiError if one asks for something else."""
        kept = {}
        for name, value in body.items():
            known = cls.neutral.get(name, ())
            if any(value == v and type(value) is type(v) for v in known):
                continue
            if name in cls.neutral and value is not None:
                served = f"only {' or '.join(map(repr, known))} is" if known else "it is not"
                raise ApiError(400, f"{name} is {_shown(value)}; {served} served", param=name)
            kept[name] = value
        return kept


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
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has a meaning with stream only")
        return self


class StreamOptions(_Part):
    include_usage: bool = False


# ---- chat ----------------------------------------------------------------------------------------------------------


class TextPart(_Part):
    """Text inside a list of contents; pictures and sound are refused by their type."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    # Parts of an earlier answer have these fields, always empty. They are accepted so that it can be sent back.
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    logprobs: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)


Content = str | Annotated[list[TextPart], FAST]


class FunctionCall(_Part):
    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    arguments: str


class MessageToolCall(_Part):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FAST] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str | None:
        return _joined(self.content)

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of role {self.role!r}; those of the assistant may have them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of role 'tool', which need it")
        return self


class Function(_Part):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]+$", max_length=_MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class ChatRequest(_CompletionBody):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "audio": (),
        "functions": (),
        "function_call": (),
        "metadata": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # the new name of max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], FAST] = Field(default_factory=list)
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)

    @classmethod
    def without_neutral_fields(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        unused = {"tools"} if body.get("tool_choice") == "none" else set()
        return super().without_neutral_fields({name: body[name] for name in body if name not in unused})

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has a meaning with logprobs: true only")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are two names of one thing; send one of them")
        return self

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# ---- text ----------------------------------------------------------------------------------------------------------


class CompletionRequest(_CompletionBody):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}

    prompt: str | Tokens | Annotated[list[str], FAST] | Annotated[list[Tokens], FAST]
    max_tokens: Annotated[int, Field(ge=1)] = 16  # as OpenAI has it
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if not self.prompt:
            raise ValueError("prompt is empty; a text, a list of tokens, or a list of either is accepted")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: the prompt's own probabilities are not computed")
        if self.n * len(self.prompts) > _MAX_CHOICES:
            raise ValueError(
                f"{len(self.prompts)} prompts with n={self.n}; {_MAX_CHOICES} answers at most are accepted"
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # the first entry shows the type of all
        return self.prompt


# ---- responses -----------------------------------------------------------------------------------------------------


class InputMessage(_Part):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    # Items of an earlier answer have these fields. They are accepted so that it can be sent back.
    id: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        return _joined(self.content) or ""


class ResponsesRequest(_Body):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "store": (False,),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "text": ({"format": {"type": "text"}},),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "include": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "metadata": ({},),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({},),
        "top_logprobs": (0,),
    }

    input: str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None


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
        return kind.model_validate(kind.without_neutral_fields(body))
    except ValidationError as problem:
        errors = problem.errors(include_url=False, include_context=False)
    # A field may have several alternative types. The one whose check went furthest is taken for the one that was meant.
    first = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    param = ".".join(str(part) for part in first["loc"] if part not in _ALTERNATIVES and "[" not in str(part))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"{param} is not served"
    elif first["type"] == "missing":
        message = f"{param} is needed"
    elif first["type"] == "value_error":
        message = f"{param}: {message}" if param else message
        param = param or (word if (word := message.split()[0]) in kind.model_fields else "")
    else:
        message = f"{param} is {_shown(first['input'])}: {message[0].lower()}{message[1:]}"
    raise ApiError(400, message, param=param or None)


# Words that pydantic puts into the location of an error besides the names of fields and positions.
_ALTERNATIVES = ("str", "int", "bool", "constrained-str")


def _shown(value: object) -> str:
    text = reprlib.repr(value)  # shortens long lists
    return text if len(text) <= 80 else f"{text[:77]}..."
