"""Schemes as compressed-tensors describes them: the ``weights`` and ``input_activations`` of a group, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpumoe.checkpoints.storage import PER_TOKEN_INSTEAD
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.scheme import (
    INTEGERS,
    MXFP4,
    MXFP6_E2M3,
    MXFP8,
    NVFP4,
    PER_TENSOR_FP8,
    PER_TENSOR_INT8,
    PER_TOKEN_AND_128_FP8,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    STATIC_FP8,
    STATIC_INT8,
    GroupShape,
    ScaleType,
    Scheme,
    TensorFormat,
)

_BLOCK = (128, 128)

#: (type, num_bits, dynamic, strategy, group_size) -> activations.
_ACTIVATIONS: dict[tuple[object, object, object, object, object], TensorFormat] = {
    ("int", 8, True, "token", None): PER_TOKEN_INT8,
    ("int", 8, True, "tensor", None): PER_TENSOR_INT8,
    ("int", 8, False, "tensor", None): STATIC_INT8,
    ("float", 8, True, "token", None): PER_TOKEN_FP8,
    ("float", 8, True, "tensor", None): PER_TENSOR_FP8,
    ("float", 8, False, "tensor", None): STATIC_FP8,
    ("float", 8, True, "group", 128): PER_TOKEN_AND_128_FP8,
    ("float", 8, True, "group", 32): MXFP8,
    ("float", 6, True, "group", 32): MXFP6_E2M3,
    ("float", 4, True, "group", 32): MXFP4,
    ("float", 4, "local", "tensor_group", 16): NVFP4,
}

#: (num_bits, strategy, group_size) -> weights that are floats.
_FLOAT_WEIGHTS: dict[tuple[object, object, object], TensorFormat] = {
    (8, "channel", None): TensorFormat("fp8", GroupShape.per_row()),
    (8, "tensor", None): TensorFormat("fp8", GroupShape.per_tensor()),
    (8, "block", None): TensorFormat("fp8", GroupShape.per_block(*_BLOCK)),
    (8, "group", 32): TensorFormat("fp8", GroupShape.per_group(32), scale="e8m0"),
    (6, "group", 32): TensorFormat("fp6-e2m3", GroupShape.per_group(32), scale="e8m0"),
    (4, "group", 32): TensorFormat("fp4", GroupShape.per_group(32), scale="e8m0"),
    (4, "tensor_group", 16): TensorFormat("fp4", GroupShape.per_group(16), scale="e4m3"),
}

_SCALE_DTYPES: dict[ScaleType, str] = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}


# Values of ``actorder``. With "weight" and "static", scales belong to inputs that lie side by side.
_OWN_ORDERS = (None, False, "weight", "static")
_ACTIVATION_ORDERS = (True, "group", "dynamic")


def _order_of(weights: Mapping[str, Any]) -> object:
    order = weights.get("actorder")
    return order.lower() if isinstance(order, str) else order if isinstance(order, bool | None) else "?"


def is_activation_order(weights: Mapping[str, Any]) -> bool:
    """Return whether the ``weights`` of a group announce groups in activation order."""
    return _order_of(weights) in _ACTIVATION_ORDERS


def read_scheme(name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Scheme:
    """The scheme of the group ``name``. Raises UnsupportedScheme, or CheckpointError for what is not well-formed."""
    found = None if inputs is None else _read_activations(inputs)
    activations = found and PER_TOKEN_INSTEAD.get(found, found)
    if weights.get("dynamic", False) or _order_of(weights) not in (*_OWN_ORDERS, *_ACTIVATION_ORDERS):
        raise UnsupportedScheme("weights with stored scales, in activation order 'group', 'weight' or 'static', are")
    if weights.get("type", "int") == "float":
        return Scheme(_read_float_weights(name, weights), activations)
    return _read_integer_scheme(name, weights, activations)


def stored_activations(inputs: Mapping[str, Any] | None) -> TensorFormat | None:
    """Return the activations that the files name if others are computed; None if these are the scheme's.

    The section must have been accepted by :func:`read_scheme`.
    """
    found = None if inputs is None else _read_activations(inputs)
    return found if found in PER_TOKEN_INSTEAD else None


def _read_activations(inputs: Mapping[str, Any]) -> TensorFormat:
    kind, dynamic, size = inputs.get("type", "int"), inputs.get("dynamic", False), inputs.get("group_size")
    strategy = inputs.get("strategy") or ("group" if size else "token" if dynamic else "tensor")
    key = (kind, inputs.get("num_bits"), dynamic, strategy, size or None)
    # Integers per token have a zero point here, whatever they would have elsewhere: it is finer, and is not stored.
    symmetric = inputs.get("symmetric", True) is True or (kind == "int" and dynamic is True)
    found = _ACTIVATIONS.get(key) if _is_hashable(key) and symmetric else None
    if found is None:
        raise UnsupportedScheme(
            "activations in float, in 8-bit integers (dynamic per token or per tensor, or with one stored scale), in "
            "fp8 (dynamic per token, per tensor or per 128 inputs, or with one stored scale), in mxfp4, mxfp6, mxfp8 "
            "and nvfp4 are"
        )
    return found


def _read_float_weights(name: str, weights: Mapping[str, Any]) -> TensorFormat:
    bits, size = weights.get("num_bits"), weights.get("group_size")
    size = None if size in (0, -1) else size  # so some have it per channel
    strategy = weights.get("strategy") or ("group" if size else "channel")
    if strategy == "block" and _block_of(weights.get("block_structure")) != _BLOCK:
        raise UnsupportedScheme(f"blocks of {weights.get('block_structure')!r:.40}; [128, 128] is")
    key = (bits, strategy, size)
    found = _FLOAT_WEIGHTS.get(key) if _is_hashable(key) else None
    if found is None or weights.get("symmetric", True) is not True:
        raise UnsupportedScheme(
            "symmetric 8-bit floats per channel, tensor or block of 128x128, and mxfp8, mxfp6, mxfp4 and nvfp4 are"
        )
    return found


def _read_integer_scheme(name: str, weights: Mapping[str, Any], activations: TensorFormat | None) -> Scheme:
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "group" if isinstance(size, int) and size > 0 else "channel"
    if weights.get("type", "int") != "int" or bits not in (4, 8) or strategy not in ("channel", "group", "tensor"):
        raise UnsupportedScheme(
            "integers of 4 or 8 bits per channel, group or tensor, and floats of 4, 6 and 8 bits, are"
        )
    if strategy == "group" and not (isinstance(size, int) and size > 0):
        raise CheckpointError(f"{name}: strategy 'group' with group_size={size!r}; a positive number is accepted")
    text = f"w{bits}a16" + (f"-g{size}" if strategy == "group" else "")
    symmetric = "" if weights.get("symmetric", True) is True else "-asym"
    if symmetric and strategy == "tensor":
        raise UnsupportedScheme("asymmetric integers per channel or group, and symmetric ones per tensor, are")
    return Scheme(Scheme.parse(text + symmetric).weights, activations)


def _is_hashable(key: tuple[object, ...]) -> bool:
    """Whether the values of fields can be looked up: JSON has lists and objects too."""
    return all(isinstance(value, str | int | bool | None) for value in key)


def _block_of(value: object) -> tuple[object, ...]:
    """``[128, 128]``, or ``"128x128"`` as older files have it."""
    if isinstance(value, str):
        return tuple(int(part) if part.isdecimal() and len(part) < 9 else part for part in value.split("x"))
    return tuple(value) if isinstance(value, list | tuple) else ()


def weights_section(weights: TensorFormat, activation_order: bool) -> dict[str, Any]:
    """The ``weights`` of a group."""
    group = weights.group
    section: dict[str, Any] = {
        "num_bits": weights.bits,
        "type": "int" if weights.element in INTEGERS else "float",
        "symmetric": weights.symmetric,
        "dynamic": False,
        "strategy": _strategy(weights, per_row="channel"),
        "group_size": None if group.rows != 1 else group.columns,
    }
    if section["strategy"] == "block":
        section["block_structure"] = [group.rows, group.columns]
    if activation_order:
        section["actorder"] = "group"
    return section | _scale_dtype(weights)


def activations_section(form: TensorFormat | None) -> dict[str, Any] | None:
    """The ``input_activations`` of a group."""
    if form is None:
        return None
    section: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "int" if form.element in INTEGERS else "float",
        "symmetric": True,  # this is what other readers compute with; ours has a zero point per token
        "dynamic": "local" if form == NVFP4 else form.dynamic,
        "strategy": _strategy(form, per_row="token"),
    }
    groups = {} if form.group.columns is None else {"group_size": form.group.columns}
    return section | groups | _scale_dtype(form)


def _strategy(form: TensorFormat, per_row: str) -> str:
    group = form.group
    if group.columns is None:
        return "tensor" if group.rows is None else per_row
    return "block" if group.rows != 1 else "tensor_group" if form.scale == "e4m3" else "group"


def _scale_dtype(form: TensorFormat) -> dict[str, str]:
    return {"scale_dtype": _SCALE_DTYPES[form.scale]} if form.scale in _SCALE_DTYPES else {}
