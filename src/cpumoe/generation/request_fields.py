"""Building blocks of the request schemas: strict models, fields with fixed values, and hints without an effect."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Validating a list ends at the first wrong entry: a million errors would take seconds, and block all connections.
FAST = Field(fail_fast=True)


class Part(BaseModel):
    """Any JSON object in a request: types are strict, and unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        """Drop fields that are null, whatever their name: clients send back answers with null fields of their own."""
        return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


class Only:
    """Annotation of a field that may only ask for what happens anyway: null or one of ``values``.

    Where a list or an object is among the values, the empty one is accepted too.

    The validated value is None in all cases, so that nothing depends on whether the field was sent.
    """

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: Any) -> None:
        if any(type(value) is type(v) and (value == v or value in ([], {})) for v in self._values):
            return
        served = f"only {' or '.join(map(repr, self._values))} is served" if self._values else "it is not served"
        raise PydanticCustomError("unsupported", "{served}", {"served": served})


class PromptCacheOptions(Part):
    """Prompt caching as it always works here: automatic, without a promise how long a prefix stays."""

    mode: Annotated[Any, Only("implicit")] = None
    ttl: Annotated[Any, Only("30m")] = None
    prewarm: Annotated[Any, Only(False)] = None
    comparison_response_id: Annotated[Any, Only()] = None


class Hints(Part):
    """Fields of the official request types that label a request or ask for what happens anyway.

    Labels and hints have no effect on the answer by their definition.
    """

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    moderation: Annotated[Any, Only()] = None
