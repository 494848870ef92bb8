"""Checkpoints of NVIDIA's ModelOpt, ``quant_method: modelopt``: NVFP4, and FP8 with one scale for all of a linear.

NVFP4: ``weight`` (uint8) has two codes of e2m1 to a byte, the first in the low nibble; ``weight_scale`` is e4m3 for 16
inputs and ``weight_scale_2`` fp32 for all of the linear; a weight is the product of the three. ``input_scale`` is the
same as ``weight_scale_2`` for the inputs. FP8: ``weight`` (e4m3), ``weight_scale`` and, if activations have a stored
scale, ``input_scale``. The configuration is in config.json, or in hf_quant_config.json inside of ``quantization``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cpumoe.checkpoints.formats.by_tensors import QuantizedByTensors
from cpumoe.checkpoints.formats.fields import read_names, read_object
from cpumoe.checkpoints.formats.float_storages import Fp4Storage, Fp8Storage
from cpumoe.checkpoints.formats.kv_cache_scheme import KvCacheScheme, read_kv_cache
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import PER_TENSOR_FP8, Scheme

_METHOD = "modelopt"
_INPUT_SCALE = "input_scale"


@dataclass(frozen=True)
class ModeloptFp4Storage(Fp4Storage):
    """4-bit floats whose second scales multiply."""

    weight_suffix: ClassVar[str] = "weight"
    global_suffix: ClassVar[str] = "weight_scale_2"
    input_suffix: ClassVar[str] = _INPUT_SCALE
    divides: ClassVar[bool] = False


# quant_algo -> how linears are stored, with a stored scale of the inputs and without one.
_ALGORITHMS: dict[str, tuple[LinearStorage, LinearStorage]] = {
    "NVFP4": (
        ModeloptFp4Storage(Scheme.parse("nvfp4"), _METHOD),
        ModeloptFp4Storage(Scheme.parse("nvfp4a16"), _METHOD),
    ),
    "FP8": (
        Fp8Storage(Scheme.parse("fp8-tensor"), _METHOD),
        Fp8Storage(Scheme.parse("fp8-tensor-token"), _METHOD, stored_activations=PER_TENSOR_FP8),
    ),
}
_WAYS = {storage: ways for ways in _ALGORITHMS.values() for storage in ways}


class ModeloptQuantization(QuantizedByTensors):
    """The configuration of such a checkpoint."""

    suffixes: ClassVar[frozenset[str]] = frozenset(("weight_scale", "weight_scale_2", _INPUT_SCALE))

    @classmethod
    def parse(cls, section: object) -> ModeloptQuantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        settings = read_object(section.get("quantization", section), "quantization")
        algorithm = settings.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            accepted = " and ".join(_ALGORITHMS)
            raise UnsupportedScheme(f"quant_algo {algorithm!r:.80} is not served; {accepted} are")
        size = settings.get("group_size")
        if algorithm == "NVFP4" and size not in (None, 16):
            raise UnsupportedScheme(f"quant_algo NVFP4 with group_size {size!r:.80} is not served; 16 is")
        left = read_names(settings, "exclude_modules", "ignore")
        return cls(_ALGORITHMS[algorithm][0], left, kv_cache=_read_kv_cache(settings))

    def storages_of(self, module: str) -> tuple[LinearStorage, ...]:
        return tuple(way for storage in super().storages_of(module) for way in _WAYS[storage])

    def storage_with(self, names: Collection[str]) -> LinearStorage:
        if any(name.endswith(f".{_INPUT_SCALE}") for name in names):
            return self.storage
        return _WAYS[self.storage][1]


def _read_kv_cache(settings: Mapping[str, Any]) -> KvCacheScheme | None:
    """The KV cache as hf_quant_config.json names it, or as config.json describes it."""
    if (algorithm := settings.get("kv_cache_quant_algo")) is None:
        return read_kv_cache(settings)
    if algorithm not in ("FP8", "INT8"):
        raise UnsupportedScheme(f"kv_cache_quant_algo {algorithm!r:.80} is not served; 'FP8' and 'INT8' are")
    return KvCacheScheme("kv_cache_quant_algo", algorithm)
