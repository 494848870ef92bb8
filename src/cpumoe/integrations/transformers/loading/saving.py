"""Saving a model with packed modules as a compressed-tensors checkpoint: the ``quantization_config`` and tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings, revert_weight_conversion

from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig, write_config
from cpumoe.checkpoints.formats.words import copied
from cpumoe.checkpoints.held_scales import held_scheme
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.layout.disk_names import DiskNames
from cpumoe.integrations.transformers.layout.expert_modules import describe_experts, expert_modules
from cpumoe.integrations.transformers.layout.expert_places import SPELLINGS
from cpumoe.integrations.transformers.layout.model_classes import empty_model
from cpumoe.integrations.transformers.loading.special_experts import experts_name
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS, Scheme
from cpumoe.ops import read_spec

#: Where a model keeps what transformers did with the names in its files.
ORIGINAL_CONVERSIONS = "_cpumoe_weight_conversions"


def quantization_section(model: PreTrainedModel, loaded: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The ``quantization_config`` that describes a model with packed modules; None if all of these are in float.

    Modules keep the format of compressed-tensors that they have in ``loaded``, the section of the checkpoint that they
    came from.
    """
    before = None if loaded is None else parse_quantization(loaded)
    storages: dict[LinearStorage, list[str]] = {}
    ignore: list[str] = []
    written = _WrittenNames(model)
    float_experts = {name for name, _ in expert_modules(model)}

    def inside(name: str) -> str:
        """A pattern for everything inside the experts at ``name``, in the model and in files."""
        return f"re:^({'|'.join(n.replace('.', '[.]') for n in (name, written.experts(name)))})[.]"

    def storage_of(scheme: Scheme, name: str, ordered: bool) -> LinearStorage:
        found = [] if before is None else [s for n in written.all_of(name) for s in before.storages_of(n)]
        was = next((storage for storage in found if _may_be_held_as(storage.scheme, scheme)), None)
        activations = None
        if was is not None:
            # Files may be in activation order without a word of it in their configuration.
            if isinstance(before, QuantizationConfig) and was.has_input_order == ordered:
                return was
            scheme, activations = was.scheme, was.stored_activations
        # Activations that were asked for are a matter of running the weights, not of the weights.
        return storage_for(replace(scheme, requested=None), activation_order=ordered, activations=activations)

    has_packed_floats = False
    for name, module in model.named_modules():
        if isinstance(module, Experts | QuantizedLinear) and _is_float(module):
            has_packed_floats = True
            ignore += [inside(experts_name(name))] if isinstance(module, Experts) else written.all_of(name)
        elif isinstance(module, Experts):
            ordered = module.quantized(0, 1).gate_up.input_order is not None
            path = experts_name(name)
            storage = storage_of(module.config.scheme, f"{path}.0.up_proj", ordered)
            storages.setdefault(storage, []).append(inside(path))
        elif isinstance(module, QuantizedLinear):
            ordered = read_spec(module.weight_packed).input_orders != 0
            storages.setdefault(storage_of(module.scheme, name, ordered), []).extend(written.all_of(name))
        elif name in float_experts:
            ignore.append(inside(name))
        elif isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2:  # routers too
            ignore += written.all_of(name)
    if not storages and has_packed_floats:
        return None
    if not storages:
        raise UnsupportedScheme(
            "no module of this model can be packed: its linears have no inputs that the scheme fits; a smaller group "
            'size may: cpumoe.load_model(path, scheme="w4a8-g32", linears="w4a8-g32")'
        )
    # The storage with the most modules is given for all linears; modules with another one are listed by name.
    commonest, *others = sorted(storages, key=lambda storage: -len(storages[storage]))
    targets = {"Linear": commonest} | {target: storage for storage in others for target in storages[storage]}
    return write_config(targets, ignore)


def _may_be_held_as(stored: Scheme, scheme: Scheme) -> bool:
    """Return whether weights stored in one scheme may be what is held as another.

    Packed weights tell neither one scale for all of a linear from one per row, nor int8 activations on request from
    those of the checkpoint.
    """
    weights = (stored.weights, held_scheme(stored).weights)
    return scheme.weights in weights and needs_input_scales(stored) == needs_input_scales(scheme)


def _is_float(module: Experts | QuantizedLinear) -> bool:
    scheme = module.config.scheme if isinstance(module, Experts) else module.scheme
    return scheme.weights.element in WHOLE_FLOATS


def state_dict_for_saving(model: PreTrainedModel, config: QuantizationConfig | None) -> dict[str, Tensor]:
    """All tensors of a model as a compressed-tensors checkpoint has them, or as a float one does (None), by the names
    that files have for them: transformers must not rename them again.

    A packed head has tensors of its own, so the configuration is changed to say that the head is not tied.
    """
    if isinstance(model.get_output_embeddings(), QuantizedLinear):
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    original = empty_model(copy.deepcopy(model.config), type(model))
    names, written = DiskNames(original, ()), _WrittenNames(model)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, Experts | QuantizedLinear)}
    of_packed = {n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, Experts | QuantizedLinear)}
    floats = {k: t for k, t in model.state_dict().items() if k.rpartition(".")[0] not in of_packed}
    out: dict[str, Tensor] = {}

    def add(name: str, weight: QuantizedWeight) -> None:
        storage = None if config is None else config.storage_of(name)
        tensors = {"weight": weight.values} if storage is None else storage.encode(weight)
        # Gate and up may have one scale in memory, which transformers refuses to write under two names.
        out.update({f"{name}.{key}": copied(tensor) for key, tensor in tensors.items()})
        if weight.bias is not None:
            out[f"{name}.bias"] = copied(weight.bias)

    for name, module in packed.items():
        if isinstance(module, QuantizedLinear):
            add(written.all_of(name)[-1], unpack_weight(module.weight_packed)[0])
            continue
        path, gated = experts_name(name), bool(module.config.activation.gated)
        first = "gate_up_proj" if gated else "up_proj"
        if _is_float(module):
            floats |= {f"{path}.{k}": t for k, t in _fused_floats(module, original.get_submodule(path)).items()}
            continue
        leaves = [*(names.leaf_names(f"{path}.{first}") or SPELLINGS[0][:2][not gated :])]
        leaves += names.leaf_names(f"{path}.down_proj") or SPELLINGS[0][2:]
        for expert in range(module.config.local_experts):
            for leaf, weight in zip(leaves, module.quantized(expert, 1)[0].linears(gated=gated), strict=True):
                add(f"{written.experts(path)}.{expert}.{leaf}", weight)
    original._weight_conversions = written.conversions
    reverted: dict[str, Tensor] = revert_weight_conversion(original, floats)  # takes experts in float apart too
    return reverted | out


def _fused_floats(experts: Experts, original: nn.Module) -> dict[str, Tensor]:
    """Float experts as the module has them that they were packed from, by the names of its parameters."""
    kind, held = describe_experts(original), experts.quantized()

    def in_order(rows: Tensor) -> Tensor:  # [E, rows, ...], gate before up -> the same as the model has it
        return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if kind.interleaved else rows

    def turned(matrix: Tensor) -> Tensor:
        return (matrix.transpose(1, 2) if kind.marks.is_transposed else matrix).contiguous()

    if kind.marks.is_flat:
        parts = [*held.gate_up.values.chunk(2, 1), held.down.values.transpose(1, 2)]
        return {name: part.flatten(0, 1).contiguous() for name, part in zip(kind.products, parts, strict=True)}
    first, second = turned(in_order(held.gate_up.values)), turned(held.down.values)
    (first_name,) = kind.marks.first_names
    if identities := len(original.get_parameter(first_name)) - len(first):  # experts without weights have a place there
        first = torch.cat((first, first.new_zeros((identities, *first.shape[1:]))))
    tensors = {first_name: first, kind.marks.second: second}
    if kind.first_bias is not None and kind.second_bias is not None:
        assert held.gate_up.bias is not None and held.down.bias is not None  # they were packed from these
        tensors[kind.first_bias] = in_order(held.gate_up.bias).contiguous()
        tensors[kind.second_bias] = held.down.bias
    return tensors


class _WrittenNames:
    """Names of modules in files that transformers writes, where they differ from those in the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        #: What transformers did with the files that the model was loaded from, or would do.
        self.conversions = getattr(model, ORIGINAL_CONVERSIONS, None)
        if self.conversions is None:
            found = get_model_conversion_mapping(model, add_legacy=False)
            self.conversions = [transform for transform in found if not isinstance(transform, PrefixChange)]
        renamings = [t for t in self.conversions[::-1] if isinstance(t, WeightRenaming)]
        self._renamings = [renaming.reverse_transform() for renaming in renamings]

    def all_of(self, module: str) -> list[str]:
        """The name of a module in the model, and the one that files have if it is another."""
        written = apply_renamings(f"{module}.weight", self._renamings).removesuffix(".weight")
        return list(dict.fromkeys((module, written)))

    def experts(self, module: str) -> str:
        """What the names of the linears of experts start with in files."""
        ending = ".0.linear"  # any name: that of a linear of experts may be one that is renamed elsewhere
        return self.all_of(f"{module}{ending}")[-1].removesuffix(ending)


def keep_names_when_saved(model: PreTrainedModel) -> None:
    """Lets transformers write a model's tensors under the names that we give them.

    It would rename them once more, and take tensors of quantised linears for those of float ones.
    """
    if not hasattr(model, ORIGINAL_CONVERSIONS):
        setattr(model, ORIGINAL_CONVERSIONS, getattr(model, "_weight_conversions", None))
    model._weight_conversions = []
