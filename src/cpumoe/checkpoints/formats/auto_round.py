"""AutoRound checkpoints: tensors as GPTQ or AWQ has them, under a configuration of its own.

Scales of its symmetric weights may be negative: it maps the largest magnitude of a group, whatever its sign, to the end
of the range that reaches further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpumoe.checkpoints.formats.awq import AwqStorage
from cpumoe.checkpoints.formats.gptq import ZeroPoints, gptq_storage
from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.formats.transposed_configs import (
    ModuleRules,
    TransposedQuantization,
    read_flag,
    read_overrides,
    read_scheme,
    read_text,
    refuse_fields,
)
from cpumoe.checkpoints.formats.transposed_words import TransposedStorage
from cpumoe.checkpoints.storage import Quantization
from cpumoe.errors import CheckpointError, UnsupportedScheme

_DEFAULT = "auto_round:auto_gptq"
#: ``packing_format`` -> what the zero points of its GPTQ tensors are; None for AWQ.
_PACKING: dict[str, ZeroPoints | None] = {
    _DEFAULT: ZeroPoints.LESS_ONE_IN_WORDS,
    "auto_round:gptq": ZeroPoints.LESS_ONE_IN_WORDS,
    "auto_round:gptqmodel": ZeroPoints.AS_THEY_ARE,
    "auto_round": ZeroPoints.AS_THEY_ARE,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}
#: Kernels that older versions name behind it; they do not change the files.
_KERNELS = ("exllamav2", "exllama", "triton", "tritonv2", "marlin", "cuda", "torch", "gemm")
_FLOAT_BITS = 16
#: What makes a name in ``extra_config`` a pattern.
_SPECIAL = frozenset("*+?^$()[]{}|\\")


class AutoRoundQuantization(TransposedQuantization):
    """The ``quantization_config`` of an AutoRound checkpoint."""

    @classmethod
    def parse(cls, section: object) -> Quantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        packing = _packing_format(section)
        zero_points = _PACKING[packing]

        def storage(settings: Mapping[str, Any]) -> TransposedStorage | None:
            refuse_fields(settings, {"rotation_config": "it changes the inputs", "super_bits": "scales are quantised"})
            bits, inputs = settings.get("bits"), settings.get("act_bits")
            if isinstance(bits, int) and bits >= _FLOAT_BITS:
                return None
            if inputs is not None and not (isinstance(inputs, int) and inputs >= _FLOAT_BITS):
                raise UnsupportedScheme(f"act_bits {inputs!r:.40} is not served; activations in float are")
            if (kind := read_text(settings, ("data_type",), "int")) != "int":
                raise UnsupportedScheme(f"data_type {kind!r} is not served; 'int' is")
            if zero_points is not None:
                return gptq_storage(settings, packing, zero_points)
            return AwqStorage(read_scheme(settings, read_flag(settings, "sym", True)), packing)

        default = storage(section)
        if default is None:
            raise CheckpointError(f"bits is {section['bits']}; a number below {_FLOAT_BITS} is accepted")
        overrides = read_overrides(section.get("extra_config"), "extra_config")
        by_name: dict[str, TransposedStorage | None] = {}
        by_pattern: list[tuple[NamePatterns, TransposedStorage | None]] = []
        budget = TimeBudget()
        for name, override in overrides.items():
            try:
                stored = storage({**section, **override})
            except (CheckpointError, UnsupportedScheme) as problem:
                raise type(problem)(f"extra_config {name!r:.100}: {problem}") from None
            if _SPECIAL.isdisjoint(name):
                by_name[name] = stored
            else:  # found anywhere in a name
                by_pattern.append((NamePatterns([f"re:.*(?:{name})"], budget), stored))
        return cls(default, ModuleRules(by_name, by_pattern))


def _packing_format(section: Mapping[str, Any]) -> str:
    """How tensors are packed. Older versions have it in ``backend``, which in newer ones is what to run with."""
    name = read_text(section, ("packing_format",), "") or read_text(section, ("backend",), "")
    if name in ("", "auto"):
        return _DEFAULT
    first, _, last = name.rpartition(":")
    packing = first if first and last in _KERNELS else name
    if packing not in _PACKING:
        raise UnsupportedScheme(f"packing_format {name!r} is not served; {', '.join(_PACKING)} are")
    return packing
