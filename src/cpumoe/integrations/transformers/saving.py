"""Saving a model with packed modules as a compressed-tensors checkpoint: the ``quantization_config`` and tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.formats.compressed_tensors import Format, IntegerStorage, QuantizationConfig, write_config
from cpumoe.checkpoints.loading import expert_prefixes
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.packed_modules import experts_paths, model_architecture
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.scheme import Scheme
from cpumoe.ops import unpack


def quantization_section(model: PreTrainedModel, loaded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The ``quantization_config`` that describes a model with packed modules.

    Modules keep the format (``int-quantized`` or ``pack-quantized``) that they have in ``loaded``, the section of the
    checkpoint that they came from.
    """
    before = None if loaded is None else QuantizationConfig.parse(loaded)
    storages: dict[IntegerStorage, list[str]] = {}
    ignore: list[str] = []
    architecture = model_architecture(model)
    float_experts = set() if architecture is None else set(experts_paths(model, architecture))

    def inside(name: str) -> str:
        """A pattern for everything inside the experts at ``name``, under all names that transformers may give them."""
        names = [name] if architecture is None else expert_prefixes(architecture, name)
        return f"re:^({'|'.join(n.replace('.', '[.]') for n in names)})[.]"

    def storage_of(scheme: Scheme, name: str) -> IntegerStorage:
        was = None if before is None else before.storage_of(name)
        format_name: Format = "pack-quantized" if was is None else was.format
        return IntegerStorage(scheme, format_name)

    for name, module in model.named_modules():
        if isinstance(module, Experts):
            storage = storage_of(module.config.scheme, f"{name}.0.gate_proj")
            storages.setdefault(storage, []).append(inside(name))
        elif isinstance(module, QuantizedLinear):
            storages.setdefault(storage_of(module.scheme, name), []).append(name)
        elif isinstance(module, nn.Linear):
            ignore.append(name)
        elif name in float_experts:
            ignore.append(inside(name))
    if not storages:
        raise UnsupportedScheme(
            "no module of this model can be packed: its linears have no inputs that the scheme fits; a smaller group "
            'size may: cpumoe.load_model(path, scheme="w4a8-g32", linears="w4a8-g32")'
        )
    if architecture is not None:
        ignore += [f"re:.*{path.replace('.', '[.]')}$" for path in architecture.unquantized]
    # The storage with the most modules is given for all linears; modules with another one are listed by name.
    commonest, *others = sorted(storages, key=lambda storage: -len(storages[storage]))
    targets = {"Linear": commonest} | {target: storage for storage in others for target in storages[storage]}
    return write_config(targets, ignore)


def state_dict_for_saving(model: PreTrainedModel, config: QuantizationConfig) -> dict[str, Tensor]:
    """All tensors of a model as a compressed-tensors checkpoint has them.

    A packed head has tensors of its own, so the configuration is changed to say that the head is not tied.
    """
    if isinstance(model.get_output_embeddings(), QuantizedLinear):
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    architecture = model_architecture(model)
    # If a family has several names for its projections, transformers itself reads the last ones.
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if architecture is None else architecture.projections[-1]
    packed = {n: m for n, m in model.named_modules() if isinstance(m, Experts | QuantizedLinear)}
    out = {k: t for k, t in model.state_dict().items() if k.rpartition(".")[0] not in packed}

    def add(name: str, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        storage = config.storage_of(name)
        assert storage is not None  # the configuration was made from these modules
        out.update({f"{name}.{key}": tensor.contiguous() for key, tensor in storage.encode(values, scales).items()})
        if bias is not None:
            out[f"{name}.bias"] = bias.contiguous()

    for name, module in packed.items():
        if isinstance(module, QuantizedLinear):
            values, scales, bias = unpack(module.weight_packed)
            add(name, values[0], scales[0], None if bias is None else bias[0])
            continue
        inner = module.config.intermediate_size
        for expert in range(module.config.local_experts):
            part = module.quantized(expert, 1)
            first_bias: tuple[Tensor | None, Tensor | None] = (None, None)
            if part.gate_up_bias is not None:
                first_bias = (part.gate_up_bias[0, :inner], part.gate_up_bias[0, inner:])
            second_bias = None if part.down_bias is None else part.down_bias[0]
            prefix = f"{name}.{expert}"
            values, scales = part.gate_up[0], part.gate_up_scale[0]
            add(f"{prefix}.{gate}", values[:inner], scales[:inner], first_bias[0])
            add(f"{prefix}.{up}", values[inner:], scales[inner:], first_bias[1])
            add(f"{prefix}.{down}", part.down[0], part.down_scale[0], second_bias)
    return out
