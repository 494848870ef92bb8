"""The fields of a decoder are listed once, in core/decoder/schema.h; Python has a value for each struct."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor

from cpumoe import _core
from cpumoe.ops import decoder
from cpumoe.ops.exchange import RankExchange

ARRAYS = ("Tensor", "PackedMatrix", "float32", "int32", "int64")
TYPES: dict[str, Any] = dict.fromkeys(ARRAYS, Tensor) | {"bool": bool, "int": int, "int of 32 bits": int}
TYPES |= {"float": float, "Matrix": decoder.Matrix, "RankExchange": RankExchange}


def types_in(hint: Any) -> set[Any]:
    """The types of a union or a tuple; a decoder that can be built has tensors as leaves."""
    if is_dataclass(get_origin(hint)):
        return {get_origin(hint)}
    parts = {each for part in get_args(hint) for each in types_in(part)}
    return parts or {Tensor if hint is decoder.T else hint}


def compare(struct: Any, fields: dict[str, Any]) -> None:
    hints = get_type_hints(struct)
    assert sorted(hints) == sorted(fields), struct
    for name, hint in hints.items():
        kind, may_be_none = fields[name]
        assert may_be_none or NoneType not in types_in(hint), f"{struct}.{name}"
        types = types_in(hint) - {NoneType, ...}
        kind = kind[0] if isinstance(kind, list) else kind
        if isinstance(kind, str):
            assert types == {TYPES[kind]}, f"{struct}.{name}"
        elif isinstance(kind, int):  # the largest number of an enum
            assert all(issubclass(each, int) for each in types), f"{struct}.{name}"
        elif len(types) == 1:
            compare(types.pop(), kind)
        else:
            assert {each.__name__ for each in types} == set(kind), f"{struct}.{name}"
            for each in types:
                compare(each, kind[each.__name__])


def test_values_have_the_fields_of_the_schema() -> None:
    assert is_dataclass(decoder.DecoderModel)
    compare(decoder.DecoderModel, _core.decoder_fields())
