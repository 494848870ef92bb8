"""vLLM's configurations of quantisation, with layers that cpumoe serves.

Each is vLLM's own class with a layer in front: what a ``quantization_config`` means, and which linears of a checkpoint
it is about, is read by our parsers; layers that are not served get vLLM's method, unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.loading import common_storage
from cpumoe.checkpoints.storage import LinearStorage, Quantization
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.errors import CpumoeError, UnsupportedScheme
from cpumoe.integrations.vllm.experts_method import ExpertsMethod
from cpumoe.integrations.vllm.linear_method import LinearMethod, StoredLinear, refuse_unknown_linear
from cpumoe.integrations.vllm.served_experts import GPT_OSS_NAMES, ServedExperts
from cpumoe.integrations.vllm.settings import activations_wanted
from cpumoe.integrations.vllm.telling import tell_left


class _Served:
    """In front of a configuration of vLLM's.

    What happens to it, in this order: ``from_config``; ``maybe_update_config`` with the name of the model; all of it is
    pickled for the workers; ``apply_vllm_mapper`` with what the model's class calls things, once or more; then
    ``get_quant_method`` for each layer.
    """

    #: ``quant_method`` of config.json, whatever vLLM makes of it.
    method: ClassVar[str]

    _quantization: Quantization | None = None  # None: everything is vLLM's
    _is_unknown_to_vllm: bool = False  # its class has read something else: no layer can be left to it
    _model_type: str | None = None
    _tensors: dict[str, str]  # as vLLM calls them -> as the files do
    _names: dict[str, str]  # the same for the modules that they belong to
    _dtypes: dict[str, dict[str, torch.dtype]]  # of the tensors of modules in the files, by suffix
    _left: list[str]  # layers that vLLM computes, by its names

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        read = super().from_config  # type: ignore[misc]  # of vLLM's class
        try:
            quantization = parse_quantization({**config, "quant_method": cls.method})
        except CpumoeError as problem:
            tell_left("this checkpoint", problem)
            return read(config)
        try:
            served, is_unknown = read(config), False
        except (ValueError, NotImplementedError, AssertionError):
            served, is_unknown = read(cls.readable(config)), True
        served._quantization, served._is_unknown_to_vllm = quantization, is_unknown
        served._tensors, served._names, served._dtypes, served._left = {}, {}, {}, []
        return served

    @classmethod
    def readable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Something that vLLM's class reads in the place of what it refuses and cpumoe serves."""
        return config

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        if self._quantization is None:
            stock: list[torch.dtype] = super().get_supported_act_dtypes()  # type: ignore[misc]
            return stock
        return [torch.bfloat16, torch.float16, torch.float32]

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)  # type: ignore[misc]
        if self._quantization is None:
            return
        headers = get_safetensors_params_metadata(model_name, revision=revision)
        stored = {name: info for name, info in headers.items() if "dtype" in info}
        if not any(".experts." in name for name in stored):
            reason = "it has no experts" if stored else "the names of its tensors are not known"
            self._leave("this checkpoint", reason)
            return
        self._model_type = getattr(hf_config, "model_type", None)
        self._call_tensors({name: name for name in stored})
        for name, info in stored.items():
            module, _, suffix = name.rpartition(".")
            self._dtypes.setdefault(module, {})[suffix] = DTYPES.get(info["dtype"], torch.uint8)
        try:
            self._quantization = self._quantization.with_tensors(frozenset(stored))
        except CpumoeError as problem:
            self._leave("this checkpoint", problem)

    def _leave(self, what: str, reason: object) -> None:
        if self._is_unknown_to_vllm:
            raise UnsupportedScheme(f"cpumoe does not serve {what} ({reason}), and vLLM does not know its scheme")
        self._quantization = None
        tell_left(what, reason)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]
        if self._quantization is None:
            return
        # Rules are written for names of tensors: some of them ask how one ends.
        mapped = ((hf_to_vllm_mapper.map_name(name), stored) for name, stored in self._tensors.items())
        self._call_tensors({name: stored for name, stored in mapped if name is not None})

    def _call_tensors(self, tensors: dict[str, str]) -> None:
        self._tensors = tensors
        modules = ((name.rpartition(".")[0], stored.rpartition(".")[0]) for name, stored in tensors.items())
        self._names = dict(modules)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Renamings of the checkpoint's tensors; vLLM's own leave out those of activation order."""
        if self._quantization is None:
            return super().get_checkpoint_weight_mapper()  # type: ignore[misc]
        renamed: dict[re.Pattern[str], str | None] = {}
        if self._model_type == "gpt_oss":
            pattern, name = GPT_OSS_NAMES
            renamed[re.compile(pattern)] = name
        for prefix in self._left:  # vLLM's own methods have no place for these
            stored = {s for name, s in self._names.items() if name == prefix or name.startswith(f"{prefix}.")}
            renamed |= {re.compile(rf"^{re.escape(module)}\.g_idx$"): None for module in stored}
        return WeightsMapper(orig_to_new_regex=renamed)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if self._quantization is not None:
            try:
                method = self._served_method(layer, prefix)
            except (CpumoeError, ValueError) as problem:
                if self._is_unknown_to_vllm:
                    raise UnsupportedScheme(f"{prefix}: {problem}; vLLM itself does not know this scheme") from problem
                tell_left(prefix, problem)
                self._left.append(prefix)
            else:
                if method is not None:
                    return method
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def _served_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer that is served, or of a linear that is in float; None for what is vLLM's."""
        if isinstance(layer, RoutedExperts):
            stored = self._stored_experts(layer, prefix)
            if stored is None:
                return None  # in float: vLLM asks for a method by name, which is ours too
            return ExpertsMethod(layer.moe_config, ServedExperts(layer, stored.storage, stored.dtypes))
        if isinstance(layer, LinearBase | ParallelLMHead):
            linears = self._stored_linears(prefix)
            if linears is None:
                return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
            refuse_unknown_linear(layer)
            return LinearMethod(prefix, linears)
        return None

    def _storage_of(self, module: str) -> LinearStorage | None:
        """How a linear of the files is stored, with the activations that are asked for."""
        assert self._quantization is not None
        storage = self._quantization.storage_of(module)
        if storage is None or activations_wanted() is None:
            return storage
        return replace(storage, scheme=storage.scheme.with_int8_activations())

    def _stored_experts(self, layer: Any, prefix: str) -> StoredLinear | None:
        """Where an expert's linears are in the files; raises CheckpointError where those of a layer differ."""
        inner = [name for name in self._names if name.startswith(f"{prefix}.")]
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        ends = tuple(f".{name}" for name in projections if name is not None)
        names = [self._names[name] for name in inner if name.endswith(ends)]
        if not names:  # all experts in one tensor, or names that the model's own loader changes
            names = [self._names.get(prefix, f"{prefix}.0.{projections[0]}")]
        storage = common_storage(self._storage_of, names, prefix)
        return None if storage is None else StoredLinear(names[0], storage, self._dtypes.get(names[0], {}))

    def _stored_linears(self, prefix: str) -> list[StoredLinear] | None:
        """The linears of the files that one of vLLM's consists of; None if they are in float, or shared.

        Raises UnsupportedScheme where it is not known which they are.
        """
        before, _, last = prefix.rpartition(".")
        names = [prefix]
        if prefix not in self._names:
            parts = self.packed_modules_mapping.get(last, [last])  # type: ignore[attr-defined]
            names = [f"{before}.{part}" if before else part for part in parts]
        stored = []
        for name in names:
            module = self._names.get(name)
            storage = None if module is None else self._storage_of(module)
            if module is not None and storage is not None:
                stored.append(StoredLinear(module, storage, self._dtypes.get(module, {})))
        if stored and len(stored) != len(names):
            raise UnsupportedScheme(f"of {', '.join(names)} some are quantised and some are not")
        is_shared = last == "lm_head"  # with the embedding: the files need not have it
        if not stored and not is_shared and not all(name in self._names for name in names):
            raise UnsupportedScheme(f"the files have no {', '.join(n for n in names if n not in self._names)}")
        return stored or None


class CompressedTensors(_Served, CompressedTensorsConfig):  # type: ignore[misc]  # untyped base
    method = "compressed-tensors"

    @classmethod
    def readable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """8-bit integers: vLLM does not know activation order any more, nor 6-bit floats."""
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        plain = {"format": "int-quantized", "weights": weights, "input_activations": inputs}
        groups = config["config_groups"].items()
        return {**config, "config_groups": {name: {"targets": group["targets"], **plain} for name, group in groups}}


class Gptq(_Served, AutoGPTQConfig):  # type: ignore[misc]
    method = "gptq"

    @classmethod
    def readable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Symmetric, and in the order of the inputs."""
        return {**config, "sym": True, "desc_act": False}


class Awq(_Served, AutoAWQConfig):  # type: ignore[misc]
    method = "awq"


class Fp8(_Served, Fp8Config):  # type: ignore[misc]
    method = "fp8"


class Mxfp4(_Served, GptOssMxfp4Config):  # type: ignore[misc]
    method = "mxfp4"


class ModelOptFp8(_Served, ModelOptFp8Config):  # type: ignore[misc]
    method = "modelopt"


class ModelOptNvfp4(_Served, ModelOptNvFp4Config):  # type: ignore[misc]
    method = "modelopt"


class AutoRound(_Served, INCConfig):  # type: ignore[misc]
    method = "auto-round"


#: vLLM's names of methods -> the configurations that serve them.
_METHODS: dict[str, type[_Served]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "gptq_marlin": Gptq,
    "auto_gptq": Gptq,
    "awq": Awq,
    "awq_marlin": Awq,
    "auto_awq": Awq,
    "fp8": Fp8,
    "gpt_oss_mxfp4": Mxfp4,
    "modelopt": ModelOptFp8,
    "modelopt_fp4": ModelOptNvfp4,
    "inc": AutoRound,
}


def register() -> None:
    """Puts the configurations into the place of vLLM's."""
    for name, config in _METHODS.items():
        register_quantization_config(name)(config)
