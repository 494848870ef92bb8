"""What the plug-in relies on in vLLM, by name, so that a version without it is left alone with a sentence."""

from __future__ import annotations

import importlib

#: Modules and what is used of them; attributes of classes after a dot.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "vllm.config": ("get_current_vllm_config",),
    "vllm.distributed": (
        "get_ep_group",
        "get_tp_group",
        "tensor_model_parallel_all_gather",
    ),
    "vllm.model_executor.custom_op": ("op_registry_oot",),
    "vllm.model_executor.layers.fused_moe": ("FusedMoEMethodBase", "RoutedExperts", "UnquantizedFusedMoEMethod"),
    "vllm.model_executor.layers.fused_moe.activation": ("MoEActivation",),
    "vllm.model_executor.layers.fused_moe.config": ("FusedMoEConfig",),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": (
        "FusedMoEMethodBase.apply",
        "FusedMoEMethodBase.apply_monolithic",
        "FusedMoEMethodBase.create_weights",
        "FusedMoEMethodBase.is_monolithic",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        "FusedMoEMethodBase.supports_eplb",
    ),
    "vllm.model_executor.layers.fused_moe.routed_experts": (
        "RoutedExperts.expert_map",
        "RoutedExperts.weight_loader",
        "RoutedExperts._map_global_expert_id_to_local_expert_id",
    ),
    "vllm.model_executor.layers.linear": (
        "ColumnParallelLinear",
        "LinearBase",
        "LinearMethodBase",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
        "UnquantizedLinearMethod",
    ),
    "vllm.model_executor.layers.quantization": ("register_quantization_config",),
    "vllm.model_executor.layers.quantization.auto_awq": ("AutoAWQConfig",),
    "vllm.model_executor.layers.quantization.auto_gptq": ("AutoGPTQConfig",),
    "vllm.model_executor.layers.quantization.base_config": (
        "QuantizationConfig.apply_vllm_mapper",
        "QuantizationConfig.get_checkpoint_weight_mapper",
        "QuantizationConfig.maybe_update_config",
        "QuantizationConfig.override_quantization_method",
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": ("CompressedTensorsConfig",),
    "vllm.model_executor.layers.quantization.fp8": ("Fp8Config",),
    "vllm.model_executor.layers.quantization.inc": ("INCConfig",),
    "vllm.model_executor.layers.quantization.modelopt": ("ModelOptFp8Config", "ModelOptNvFp4Config"),
    "vllm.model_executor.layers.quantization.mxfp4": ("GptOssMxfp4Config",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.models.utils": ("WeightsMapper",),
    "vllm.transformers_utils.config": ("get_safetensors_params_metadata",),
}


def missing_symbols() -> list[str]:
    """Those that this vLLM does not have."""
    missing = []
    for module_name, names in SYMBOLS.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        for name in names:
            found: object = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{module_name}.{name}")
    return missing
