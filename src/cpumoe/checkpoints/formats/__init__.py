"""On-disk formats: one file each. A new one implements ``storage.py`` and gets a row in the table below."""

from __future__ import annotations

from cpumoe import quant_methods
from cpumoe.checkpoints.formats.auto_round import AutoRoundQuantization
from cpumoe.checkpoints.formats.awq import AwqQuantization
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig as CompressedTensors
from cpumoe.checkpoints.formats.fields import read_object
from cpumoe.checkpoints.formats.fp8 import Fp8Quantization
from cpumoe.checkpoints.formats.gptq import GptqQuantization
from cpumoe.checkpoints.formats.modelopt import ModeloptQuantization
from cpumoe.checkpoints.formats.mxfp4 import Mxfp4
from cpumoe.checkpoints.formats.quark import QuarkQuantization
from cpumoe.checkpoints.storage import Quantization
from cpumoe.errors import UnsupportedScheme

_PARSERS: dict[str, type[Quantization]] = {
    "compressed-tensors": CompressedTensors,
    "mxfp4": Mxfp4,
    "fp8": Fp8Quantization,
    "modelopt": ModeloptQuantization,
    "quark": QuarkQuantization,
    "gptq": GptqQuantization,
    "awq": AwqQuantization,
    "auto-round": AutoRoundQuantization,
}

assert _PARSERS.keys() == set(quant_methods.QUANT_METHODS.values()), "a method without parser, or the reverse"

#: ``quant_method`` of a quantization_config -> what parses it.
QUANT_METHODS = {name: _PARSERS[method] for name, method in quant_methods.QUANT_METHODS.items()}

#: Files that have the configuration of a method where config.json has none.
CONFIG_FILES = {"hf_quant_config.json": "modelopt"}

#: Suffixes that only tensors of quantised linears have, in any format.
QUANTIZED_SUFFIXES = frozenset(suffix for method in QUANT_METHODS.values() for suffix in method.suffixes)


def parse_quantization(section: object) -> Quantization:
    """Parses the ``quantization_config`` of a config.json.

    Raises UnsupportedScheme for what is well-formed and not served, CheckpointError for what is not well-formed.
    """
    section = read_object(section, "quantization_config")
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in QUANT_METHODS:
        known = " and ".join(map(repr, QUANT_METHODS))
        served = "is" if len(QUANT_METHODS) == 1 else "are"
        raise UnsupportedScheme(f"quant_method {method!r} is not served; {known} {served}")
    return QUANT_METHODS[method].parse(section)
