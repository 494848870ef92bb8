"""``quant_method: fp8``: 8-bit floats as DeepSeek, Qwen and MiniMax publish them, and as AutoFP8 wrote them.

With ``weight_block_size`` a linear is ``weight`` [out, in] (e4m3) and ``weight_scale_inv`` [out / 128, in / 128], which
multiplies in spite of its name; activations are quantised per token and 128 inputs. Without it there is one scale for
all of a linear, ``weight_scale_inv`` or ``weight_scale``, and with static activations one for its inputs,
``activation_scale`` or ``input_scale``: transformers and AutoFP8 have names of their own. Dynamic activations are
computed with a scale per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cpumoe.checkpoints.formats.by_tensors import QuantizedByTensors
from cpumoe.checkpoints.formats.fields import read_names
from cpumoe.checkpoints.formats.float_storages import Fp8Storage
from cpumoe.checkpoints.formats.kv_cache_scheme import read_kv_cache
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.scheme import PER_TENSOR_FP8, Scheme

_METHOD = "fp8"
_BLOCK_SIZE = [128, 128]

# Fields that change what the weights mean -> the values with which they mean what is served.
_SERVED_VALUES: dict[str, tuple[object, ...]] = {
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),  # powers of two, in tensors of floats
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, []),  # embeddings
}


@dataclass(frozen=True)
class InverseFp8Storage(Fp8Storage):
    """8-bit floats under the names that transformers has for their scales."""

    scale_suffix: ClassVar[str] = "weight_scale_inv"
    input_suffix: ClassVar[str] = "activation_scale"


class Fp8Quantization(QuantizedByTensors):
    """The ``quantization_config`` of such a checkpoint."""

    suffixes: ClassVar[frozenset[str]] = frozenset(
        suffix for storage in (Fp8Storage, InverseFp8Storage) for suffix in (storage.scale_suffix, storage.input_suffix)
    )

    @classmethod
    def parse(cls, section: object) -> Fp8Quantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        for field, accepted in _SERVED_VALUES.items():
            if section.get(field) not in accepted:
                raise UnsupportedScheme(f"{field} {section[field]!r:.80} is not served; {accepted[-1]!r} is")
        left = read_names(section, "modules_to_not_convert", "ignored_layers")
        activations = section.get("activation_scheme", "dynamic")
        if activations not in ("dynamic", "static"):
            raise CheckpointError(f"activation_scheme is {activations!r:.80}; 'dynamic' and 'static' are accepted")
        size, kv_cache = section.get("weight_block_size"), read_kv_cache(section)
        if size is None:
            static, per_token = Scheme.parse("fp8-tensor"), Scheme.parse("fp8-tensor-token")
            if activations == "static":
                return cls(Fp8Storage(static, _METHOD), left, kv_cache=kv_cache)
            return cls(Fp8Storage(per_token, _METHOD, stored_activations=PER_TENSOR_FP8), left, kv_cache=kv_cache)
        if not isinstance(size, list | tuple) or list(size) != _BLOCK_SIZE:
            raise UnsupportedScheme(f"weight_block_size {size!r:.80} is not served; {_BLOCK_SIZE} is")
        if activations == "static":
            raise UnsupportedScheme("activation_scheme 'static' with weight_block_size is not served; 'dynamic' is")
        return cls(InverseFp8Storage(Scheme.parse("fp8-block"), _METHOD), left, kv_cache=kv_cache)

    def storage_with(self, names: Collection[str]) -> LinearStorage:
        storage, inverse = self.storage, f".{InverseFp8Storage.scale_suffix}"
        if any(name.endswith(inverse) for name in names):
            return InverseFp8Storage(storage.scheme, _METHOD, stored_activations=storage.stored_activations)
        return storage
