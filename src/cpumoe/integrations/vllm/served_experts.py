"""The experts of one layer of vLLM: taking their tensors in, and computing with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts

from cpumoe import ops
from cpumoe.checkpoints.loading import experts_config, experts_scheme
from cpumoe.checkpoints.model_layout import ExpertsShape
from cpumoe.checkpoints.pushed_experts import PushedExperts, PushedLayer, PushedLinears, PushedStacks
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.integrations.vllm.inlets import Inlet, remove_inlets
from cpumoe.integrations.vllm.layer_facts import Routing, activation_of, routing_of
from cpumoe.integrations.vllm.settings import float_scheme
from cpumoe.integrations.vllm.slices import exchange_of_slices
from cpumoe.integrations.vllm.telling import EXPERTS, take, tell_taken
from cpumoe.layers.backends import NativeBackend, select_backend
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.scheme import Scheme
from cpumoe.ops.packing import packed_experts

#: What vLLM calls the projections of an expert.
_PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}

#: Where the tensors of single experts of gpt-oss are handed over; see ``GPT_OSS_NAMES``.
_SINGLE = "pushed"

#: vLLM loads experts of gpt-oss that lie in one tensor, and overlooks single ones. Their names lead to inlets.
GPT_OSS_NAMES = (
    r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)$",
    rf".mlp.experts.routed_experts.{_SINGLE}.\1_\2_\3",
)


@dataclass(frozen=True)
class _Stacked:
    """What gpt-oss' loader calls the tensors of all experts -> what they are, and the shape of one expert's rows."""

    name: str
    block: int | None = None  # the last dimension, where vLLM has made one of the last two


_STACKED = {
    "w13_weight": _Stacked("gate_up_blocks", 16),
    "w13_weight_scale": _Stacked("gate_up_scales"),
    "w13_bias": _Stacked("gate_up_bias"),
    "w2_weight": _Stacked("down_blocks", 16),
    "w2_weight_scale": _Stacked("down_scales"),
    "w2_bias": _Stacked("down_bias"),
}
_STACKED_FLOATS = {
    "w13_weight": _Stacked("gate_up"),
    "w13_bias": _Stacked("gate_up_bias"),
    "w2_weight": _Stacked("down"),
    "w2_bias": _Stacked("down_bias"),
}


def _is_gpt_oss(layer: Any) -> bool:
    return type(layer).__name__ == "GptOssRoutedExperts"


class ServedExperts:
    """Serves the experts of a RoutedExperts.

    Made before the tensors come, when it raises UnsupportedScheme, NoBackend or ValueError for a layer that is not
    served; :meth:`open` gives the layer its inlets, :meth:`close` packs what has come.

    Args:
        layer: of vLLM.
        storage: how each linear is stored; None for float.
        dtypes: of the tensors in the files by suffix, as far as they are known.
    """

    def __init__(
        self, layer: Any, storage: LinearStorage | None, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        moe = layer.moe_config
        if moe.is_lora_enabled:
            raise UnsupportedScheme("adapters (LoRA) of experts are not served")
        if layer.expert_map_manager.num_fused_shared_experts:
            raise UnsupportedScheme("shared experts among the routed ones are not served")
        if type(layer).weight_loader is not RoutedExperts.weight_loader and not _is_gpt_oss(layer):
            raise UnsupportedScheme(f"experts of the class {type(layer).__name__}, which load in a way of their own")
        refuse_made_up_weights()
        parallel = moe.moe_parallel_config
        self._storage = storage
        self._dtypes = dtypes or {}
        self._on_input = bool(layer.apply_router_weight_on_input)
        self.routing: Routing | None = routing_of(layer)
        shape = ExpertsShape(
            moe.num_experts, moe.hidden_dim_unpadded, moe.intermediate_size, activation_of(moe), bool(moe.has_bias)
        )
        self._layer = PushedLayer(
            layer.layer_name,
            shape,
            tuple(f"{layer.layer_name}.{expert}" for expert in _held_experts(layer)),
            storage,
            float_scheme() if storage is None else None,
            parallel.tp_size,
            parallel.tp_rank,
        )
        self._stacked: Mapping[str, _Stacked] | None = None
        if storage is not None and storage.fused:
            self._stacked = _STACKED
        elif storage is None and _is_gpt_oss(layer):
            self._stacked = _STACKED_FLOATS
        self._check_backend()
        self._intake: PushedExperts | None = None
        self._slices = 0

    def _check_backend(self) -> None:
        """Raises UnsupportedScheme or NoBackend for what nobody computes; else it would be met when all is read."""
        known, storage = self._layer, self._storage
        if storage is None:
            scheme = known.scheme or Scheme.parse("bf16")  # or another kind of floats
        else:
            scheme = experts_scheme(storage, known.slices, storage.fused)
        slices = 1 if self._stacked else known.slices  # of those vLLM cuts the tensors itself
        part = ExpertsPart(tuple(range(known.held)), slices, known.slice if slices > 1 else 0)
        select_backend(experts_config(known.shape, scheme, part, known.name))

    # ---- taking tensors in -------------------------------------------------------------------------------------------

    def open(self, layer: Any, params_dtype: torch.dtype) -> None:
        """Gives the layer a parameter for every tensor that vLLM's loaders look for."""
        take(EXPERTS, self._layer.scheme if self._storage is None else self._storage.scheme)
        if self._stacked is not None:
            self._open_stacks(layer, params_dtype)
            return
        intake = self._intake = PushedLinears(self._layer)
        places = _places(layer)
        biases = self._layer.shape.has_bias or self._storage is not None  # a bias that nobody expects is looked at
        for suffix in (*self._layer.suffixes, *(("bias",) if biases else ())):
            dtype = self._dtypes.get(suffix, params_dtype)
            for stem in ("w13", "w2"):
                layer.register_parameter(f"{stem}_{suffix}", Inlet(_ExpertLoader(intake, places, suffix), dtype))
        if _is_gpt_oss(layer):
            single = nn.Module()
            for expert, place in places.items():
                for projection in self._layer.projections:
                    for suffix in (*self._layer.suffixes, "bias"):
                        loader = _SingleLoader(intake, place, projection, suffix)
                        name = f"{expert}_{projection}_proj_{suffix}"
                        single.register_parameter(name, Inlet(loader, self._dtypes.get(suffix, params_dtype)))
            layer.add_module(_SINGLE, single)

    def _open_stacks(self, layer: Any, params_dtype: torch.dtype) -> None:
        intake = self._intake = PushedStacks(self._layer)
        assert self._stacked is not None
        for name, stacked in self._stacked.items():
            if name.endswith("_bias") and not self._layer.shape.has_bias:
                continue
            dtype = torch.uint8 if stacked.block or "scale" in name else params_dtype
            loader = _StackLoader(intake, stacked)
            layer.register_parameter(name, Inlet(loader, dtype, loader.take))

    def close(self, layer: Any) -> None:
        """Packs, and puts the packed weights into the layer; raises CheckpointError by name for what is missing."""
        if self._intake is None:
            raise CheckpointError(f"{layer.layer_name}: its weights were packed before, and cannot be loaded anew")
        tell_taken()
        experts, self._intake = self._intake.finish(), None
        remove_inlets(layer)
        layer._modules.pop(_SINGLE, None)
        layer.cpumoe_experts = experts
        is_native = isinstance(experts.backend, NativeBackend)
        if is_native:
            # As an expert load balancer moves them: a row for each expert, in the memory of the packed weights.
            for name, packed in (("w13_packed", "gate_up_packed"), ("w2_packed", "down_packed")):
                rows = packed_experts(experts.get_buffer(packed))
                layer.register_parameter(name, nn.Parameter(rows, requires_grad=False))
        if self._layer.slices > 1 and is_native:
            self._slices = exchange_of_slices(self._layer.slices)

    # ---- computing ---------------------------------------------------------------------------------------------------

    def route_and_compute(self, layer: Any, x: Tensor, router_logits: Tensor) -> Tensor:
        """Tokens [tokens, H] with logits [tokens, experts] -> [tokens, H]."""
        assert self.routing is not None
        weights, ids = self.routing.choose(x, router_logits, layer.e_score_correction_bias)
        return self.compute(layer, x, ids, weights)

    def compute(self, layer: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The same for experts that are chosen, by their numbers in the whole layer: the sums of those held here."""
        experts: Experts = layer.cpumoe_experts
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]  # -1 for those of other ranks
        if not self._slices:
            return experts.forward(x, topk_ids, topk_weights, apply_router_weight_on_input=self._on_input)
        config = experts.config
        sums = ops.fused_experts(
            x,
            topk_ids,
            topk_weights,
            experts.get_buffer("gate_up_packed"),
            experts.get_buffer("down_packed"),
            *config.activation.arguments,
            self._on_input,
            True,
            self._slices,
        )
        return sums.to(x.dtype)


def _places(layer: Any) -> dict[int, int]:
    """The experts of the whole layer, physical ones where there are copies -> their places here; -1 for none."""
    find = layer._map_global_expert_id_to_local_expert_id
    return {expert: find(expert) for expert in range(layer.moe_config.num_experts)}


def _held_experts(layer: Any) -> list[int]:
    """The experts of the whole layer that this rank holds, in its order."""
    experts = {place: expert for expert, place in _places(layer).items()}
    return [experts[place] for place in range(layer.local_num_experts)]


#: Formats whose loaders do not hand the tensors of a checkpoint to a model.
_OTHER_LOAD_FORMATS = ("dummy", "ipc_cache", "modelexpress", "runai_streamer_sharded", "sharded_state", "tensorizer")


def refuse_made_up_weights() -> None:
    """Raises UnsupportedScheme where vLLM does not read the weights of a checkpoint."""
    load_format = str(getattr(get_current_vllm_config().load_config, "load_format", "auto"))
    if load_format in _OTHER_LOAD_FORMATS:
        raise UnsupportedScheme(f"weights of the load format {load_format!r} are not served")


class _ExpertLoader:
    """What vLLM's loaders call for a tensor of an expert.

    It must not know the layer: vLLM keeps what stands at a parameter for as long as there is its layer.
    """

    supports_moe_loading = True

    def __init__(self, intake: PushedLinears, places: Mapping[int, int], suffix: str) -> None:
        self._intake, self._places, self._suffix = intake, places, suffix

    def __call__(
        self,
        param: object,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if shard_id not in _PROJECTIONS:
            raise CheckpointError(
                f"{weight_name}: the part {shard_id!r} of an expert; {', '.join(_PROJECTIONS)} are accepted"
            )
        projection = _PROJECTIONS[shard_id]
        if projection == "gate" and "gate" not in self._intake.layer.projections:
            projection = "up"  # the one linear before the activation, where there is no gate
        if loaded_weight.dim() == 3:  # of all experts that are held here
            for place, tensor in enumerate(loaded_weight):
                self._intake.push(place, projection, self._suffix, tensor)
            return True if return_success else None
        place = self._places[expert_id]
        if place >= 0:
            self._intake.push(place, projection, self._suffix, loaded_weight)
        return place >= 0 if return_success else None


class _SingleLoader:
    """The same for a parameter that is that of one expert."""

    def __init__(self, intake: PushedLinears, place: int, projection: str, suffix: str) -> None:
        self._intake, self._place, self._projection, self._suffix = intake, place, projection, suffix

    def __call__(self, param: object, loaded_weight: Tensor) -> None:
        if self._place >= 0:
            self._intake.push(self._place, self._projection, self._suffix, loaded_weight)


class _StackLoader:
    """For tensors of all experts, which the loader of gpt-oss has cut to what is held here."""

    def __init__(self, intake: PushedStacks, stacked: _Stacked) -> None:
        self._intake, self._stacked = intake, stacked

    def __call__(self, param: object, loaded_weight: Tensor, **_: object) -> None:
        self.take(loaded_weight)

    def take(self, tensor: Tensor) -> None:
        block = self._stacked.block
        self._intake.push(self._stacked.name, tensor if block is None else tensor.unflatten(-1, (-1, block)))
