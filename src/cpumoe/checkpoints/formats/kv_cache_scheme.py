"""Quantised KV caches that checkpoints announce: ``kv_cache_scheme``, and the scales that were calibrated for it.

Our KV cache is held in the model's dtype or, on request, in int8 with scales that are computed from what is cached. It
is at least as exact as what was calibrated, so the scales are optional: such a checkpoint loads, its scales are checked
and not used, and the log and ``cpumoe inspect`` say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cpumoe.checkpoints.formats.fields import read_object
from cpumoe.checkpoints.formats.refused_numbers import refuse_unless_positive
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES, TensorInfo
from cpumoe.errors import CheckpointError, UnsupportedScheme

# k_scale and v_scale of an attention module; those of ModelOpt and older versions lie in the projections.
_SCALE = re.compile(r"(?:.*\.)?(?:[qkv]_scale|kv_scale|[qkv]_proj\.output_scale)")
_ZERO_POINT = re.compile(r"(?:.*\.)?(?:[qkv]_zero_point|[qkv]_proj\.output_zero_point)")
_ZERO_POINT_DTYPES = ("I8", "U8", "I32", "F8_E4M3", *FLOAT_DTYPES)

_STRATEGIES = {"tensor": "per tensor", "attn_head": "per head", "token": "per token"}


@dataclass(frozen=True)
class KvCacheScheme:
    """A quantised KV cache as a ``quantization_config`` describes it.

    Attributes:
        field: of the ``quantization_config``.
        description: in words.
        per_head: each head has a scale of its own.
        symmetric: zero points are 0.
    """

    field: str
    description: str
    per_head: bool = False
    symmetric: bool = True

    def tensors(self, names: Iterable[str], info: Callable[[str], TensorInfo]) -> dict[str, StoredTensor]:
        """Return the scales and zero points of the KV cache among the tensors of a checkpoint, by name."""
        found: dict[str, StoredTensor] = {}
        for name in names:
            if _SCALE.fullmatch(name):
                shape = self._shape(info(name).shape)
                found[name] = StoredTensor(FLOAT_DTYPES, shape, by_rows=False, check=refuse_unless_positive)
            elif _ZERO_POINT.fullmatch(name):
                shape = self._shape(info(name).shape)
                found[name] = StoredTensor(_ZERO_POINT_DTYPES, shape, by_rows=False, check=self._check_zero_point)
        return found

    def _shape(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that is expected where a tensor has the shape ``found``."""
        if not self.per_head:
            return () if found == () else (1,)
        heads = found[0] if found and found[0] > 0 else 1
        return (heads,) if len(found) == 1 else (heads, 1, 1)

    def _check_zero_point(self, name: str, zero_point: Tensor) -> None:
        if self.symmetric and bool((zero_point.float() != 0).any()):
            value = float(zero_point.float().reshape(-1)[0])
            raise CheckpointError(f"{name} is {value:g}, and {self.field} is symmetric; 0 is accepted")

    def use(self, scale_count: int, held: str | None) -> str:
        """Return what is done about it, in words; ``held``: the ``kv_cache`` that was asked for."""
        dtype = "the model's dtype (kv_cache='int8' halves it)" if held is None else held
        scales = f", and its {scale_count} calibrated scales and zero points are not used" if scale_count else ""
        return f"{self.field} ({self.description}): the KV cache is held in {dtype}{scales}"


def read_kv_cache(section: Mapping[str, Any], field: str = "kv_cache_scheme") -> KvCacheScheme | None:
    """Return the KV cache that ``section`` describes as compressed-tensors does; None without one.

    Raises UnsupportedScheme for one that is unknown, CheckpointError for what is not well-formed.
    """
    value = section.get(field)
    if value is None or value == {}:
        return None
    if value == "static":  # as AutoFP8 has it
        return KvCacheScheme(field, "static 8-bit float per tensor")
    value = read_object(value, field)
    kind, bits, dynamic = value.get("type", "int"), value.get("num_bits", 8), value.get("dynamic", False)
    strategy, symmetric = value.get("strategy") or ("token" if dynamic else "tensor"), value.get("symmetric", True)
    known = (kind in ("int", "float") and bits == 8 and isinstance(bits, int)) and isinstance(strategy, str)
    if not known or strategy not in _STRATEGIES or not isinstance(dynamic, bool) or not isinstance(symmetric, bool):
        raise UnsupportedScheme(
            f"{field} {dict(value)!r:.200} is not served; 8-bit int and float per tensor, attn_head or token are"
        )
    words = ["dynamic" if dynamic else "", "" if symmetric else "asymmetric", f"{bits}-bit {kind}"]
    description = " ".join(filter(None, [*words, _STRATEGIES[strategy]]))
    return KvCacheScheme(field, description, per_head=strategy == "attn_head", symmetric=symmetric)
