"""The fields of a decoder are listed once, in core/decoder/schema.h; Python has a value for each struct."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cpumoe import _core
from cpumoe.ops import decoder

STRUCTS = _core.decoder_fields()


@pytest.mark.parametrize("name", STRUCTS)
def test_values_have_the_fields_of_the_schema(name: str) -> None:
    names = [field.name for field in fields(getattr(decoder, name))]
    assert sorted(names) == sorted(STRUCTS[name])


def test_every_mixer_is_in_the_schema() -> None:
    assert {kind.__name__ for kind in decoder.Mixer.__args__} <= set(STRUCTS)
