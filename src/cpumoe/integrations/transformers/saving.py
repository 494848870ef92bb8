"""Saving a model with packed modules as a compressed-tensors checkpoint: the ``quantization_config`` and tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.architectures import Projections
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig, write_config
from cpumoe.checkpoints.formats.words import copied
from cpumoe.checkpoints.held_scales import held_scheme
from cpumoe.checkpoints.loading import expert_prefixes
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.packed_modules import experts_paths, model_architecture
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS, Scheme
from cpumoe.ops import read_spec


def quantization_section(model: PreTrainedModel, loaded: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The ``quantization_config`` that describes a model with packed modules; None if all of these are in float.

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
        if was is not None and scheme.weights in (was.scheme.weights, held_scheme(was.scheme).weights):
            if isinstance(before, QuantizationConfig):
                return was
            # Packed weights tell neither one scale for all of a linear from one per row, nor int8 activations on
            # request from those of the checkpoint. Whether inputs have a stored scale its tensors told.
            if needs_input_scales(was.scheme) == needs_input_scales(scheme):
                scheme = was.scheme
        # Activations that were asked for are a matter of running the weights, not of the weights.
        return storage_for(replace(scheme, requested=None), activation_order=ordered)

    has_packed_floats = False
    for name, module in model.named_modules():
        if isinstance(module, Experts | QuantizedLinear) and _is_float(module):
            has_packed_floats = True
            ignore.append(inside(name) if isinstance(module, Experts) else name)
        elif isinstance(module, Experts):
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
    if not storages and has_packed_floats:
        return None
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


def _is_float(module: Experts | QuantizedLinear) -> bool:
    scheme = module.config.scheme if isinstance(module, Experts) else module.scheme
    return scheme.weights.element in WHOLE_FLOATS


def state_dict_for_saving(model: PreTrainedModel, config: QuantizationConfig | None) -> dict[str, Tensor]:
    """All tensors of a model as a compressed-tensors checkpoint has them, or as a float one does (None).

    A packed head has tensors of its own, so the configuration is changed to say that the head is not tied.
    """
    if isinstance(model.get_output_embeddings(), QuantizedLinear):
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    architecture = model_architecture(model)
    # If a family has several names for its projections, transformers itself reads the last ones.
    projections = Projections("gate_proj", "up_proj", "down_proj")
    if architecture is not None:
        projections = architecture.projections[-1]
    packed = {n: m for n, m in model.named_modules() if isinstance(m, Experts | QuantizedLinear)}
    out = {k: t for k, t in model.state_dict().items() if k.rpartition(".")[0] not in packed}

    def add(name: str, weight: QuantizedWeight) -> None:
        storage = None if config is None else config.storage_of(name)
        tensors = {"weight": weight.values} if storage is None else storage.encode(weight)
        # Gate and up may have one scale in memory, which transformers refuses to write under two names.
        out.update({f"{name}.{key}": copied(tensor) for key, tensor in tensors.items()})
        if weight.bias is not None:
            out[f"{name}.bias"] = copied(weight.bias)

    for name, module in packed.items():
        if isinstance(module, QuantizedLinear):
            add(name, unpack_weight(module.weight_packed)[0])
        elif architecture is not None and architecture.fused is not None and _is_float(module):
            out |= {f"{name}.{key}": t for key, t in _fused_floats(module, architecture.fused.interleaved).items()}
        else:
            for expert in range(module.config.local_experts):
                part, prefix = module.quantized(expert, 1)[0], f"{name}.{expert}"
                gate, up = part.gate_up.halves()
                add(f"{prefix}.{projections.gate}", gate)
                add(f"{prefix}.{projections.up}", up)
                add(f"{prefix}.{projections.down}", part.down)
    return out


def _fused_floats(experts: Experts, interleaved: bool) -> dict[str, Tensor]:
    """Float experts as families have them that keep all of a layer in one tensor, inputs before outputs."""
    held = experts.quantized()

    def in_order(rows: Tensor) -> Tensor:  # [E, 2 I, ...], gate before up -> the same as files have it
        return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if interleaved else rows

    tensors = {
        "gate_up_proj": in_order(held.gate_up.values).transpose(1, 2).contiguous(),
        "down_proj": held.down.values.transpose(1, 2).contiguous(),
    }
    if held.gate_up.bias is not None and held.down.bias is not None:
        tensors["gate_up_proj_bias"] = in_order(held.gate_up.bias).contiguous()
        tensors["down_proj_bias"] = held.down.bias
    return tensors
