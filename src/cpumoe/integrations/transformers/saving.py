"""Saving a model with packed modules as a compressed-tensors checkpoint: the ``quantization_config`` and tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_storages import Fp4Storage, IntegerStorage, storage_for
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig, write_config
from cpumoe.checkpoints.loading import expert_prefixes
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.packed_modules import experts_paths, model_architecture
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme
from cpumoe.ops import read_spec


def quantization_section(model: PreTrainedModel, loaded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The ``quantization_config`` that describes a model with packed modules.

    Modules keep the format of compressed-tensors that they have in ``loaded``, the section of the checkpoint that they
    came from.
    """
    before = None if loaded is None else parse_quantization(loaded)
    storages: dict[LinearStorage, list[str]] = {}
    ignore: list[str] = []
    architecture = model_architecture(model)
    float_experts = set() if architecture is None else set(experts_paths(model, architecture))

    def inside(name: str) -> str:
        """A pattern for everything inside the experts at ``name``, under all names that transformers may give them."""
        names = [name] if architecture is None else expert_prefixes(architecture, name)
        return f"re:^({'|'.join(n.replace('.', '[.]') for n in names)})[.]"

    def storage_of(scheme: Scheme, name: str, ordered: bool) -> LinearStorage:
        was = None if before is None else before.storage_of(name)
        if was is not None and was.scheme.weights == scheme.weights:
            if isinstance(was, IntegerStorage | Fp4Storage):
                return was
            scheme = was.scheme  # packed weights do not tell int8 activations on request from those of the checkpoint
        # Activations that were asked for are a matter of running the weights, not of the weights.
        return storage_for(replace(scheme, requested=None), activation_order=ordered)

    for name, module in model.named_modules():
        if isinstance(module, Experts):
            ordered = module.quantized(0, 1).gate_up.input_order is not None
            storage = storage_of(module.config.scheme, f"{name}.0.gate_proj", ordered)
            storages.setdefault(storage, []).append(inside(name))
        elif isinstance(module, QuantizedLinear):
            ordered = read_spec(module.weight_packed).input_orders != 0
            storages.setdefault(storage_of(module.scheme, name, ordered), []).append(name)
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

    def add(name: str, weight: QuantizedWeight) -> None:
        storage = config.storage_of(name)
        assert storage is not None  # the configuration was made from these modules
        out.update({f"{name}.{key}": tensor.contiguous() for key, tensor in storage.encode(weight).items()})
        if weight.bias is not None:
            out[f"{name}.bias"] = weight.bias.contiguous()

    for name, module in packed.items():
        if isinstance(module, QuantizedLinear):
            add(name, unpack_weight(module.weight_packed)[0])
            continue
        for expert in range(module.config.local_experts):
            part, prefix = module.quantized(expert, 1)[0], f"{name}.{expert}"
            for projection, weight in zip((gate, up), part.gate_up.halves(), strict=True):
                add(f"{prefix}.{projection}", weight)
            add(f"{prefix}.{down}", part.down)
    return out
