"""Checks before a model is loaded that its weights fit into the free memory.

The sizes follow from headers and the model on the meta device: nothing is read for them.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from cpumoe import cpu, settings
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.model_layout import ModelLayout
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.errors import NotEnoughMemory
from cpumoe.free_memory import available_bytes
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model
from cpumoe.integrations.transformers.layout.model_description import describe_model
from cpumoe.integrations.transformers.loading.module_sources import PackedModule
from cpumoe.parallel.ranks import Ranks
from cpumoe.tables import size_text


@dataclass(frozen=True)
class WeightBytes:
    """What the weights of a model take in memory.

    Attributes:
        packed: of packed modules.
        floats: of everything else.
        cached: that part of the packed modules which is mapped from a packed cache.
        mapped_floats: that part of the floats which transformers maps from the checkpoint.
    """

    packed: int = 0
    floats: int = 0
    cached: int = 0
    mapped_floats: int = 0

    @property
    def whole(self) -> int:
        return self.packed + self.floats

    @property
    def mapped(self) -> int:
        """Mapped from files: the kernel can drop it and read it again, so that it needs no free memory."""
        return self.cached + self.mapped_floats


def weight_bytes(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    layout: ModelLayout,
    packed: Iterable[PackedModule],
    *,
    is_cached: bool,
) -> WeightBytes:
    """Return the sizes of a model on the meta device whose packed modules have been taken out.

    ``is_cached``: the packed tensors are mapped from a packed cache.
    """
    modules = {id(module): module for module in packed}.values()  # tied experts are packed once
    in_cache = sum(module.weight_bytes for module in modules if module.tensor_names) if is_cached else 0
    stored = _stored_names(layout)
    floats = mapped = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in model.all_tied_weights_keys:
            continue
        floats += tensor.nbytes
        if _is_mapped(tensor, stored.get(name), checkpoint):
            mapped += tensor.nbytes
    return WeightBytes(sum(module.weight_bytes for module in modules), floats, in_cache, mapped)


def float_model_bytes(folder: Path) -> int:
    """Return the memory that a float checkpoint takes which is left to transformers, without what it maps."""
    with Checkpoint.open(folder) as checkpoint:
        model = empty_model(config_of(checkpoint.config)).to(cpu.float_dtype()[0])
        weights = weight_bytes(model, checkpoint, describe_model(model, checkpoint), (), is_cached=False)
    return weights.whole - weights.mapped


def _is_mapped(tensor: Tensor, source: str | None, checkpoint: Checkpoint) -> bool:
    """Whether transformers maps a tensor from its file: it does so with what it need not convert."""
    if source is None or source not in checkpoint or not checkpoint.can_be_mapped(source):
        return False
    info = checkpoint.info(source)
    return DTYPES.get(info.dtype) == tensor.dtype and tuple(info.shape) == tuple(tensor.shape)


def _stored_names(layout: ModelLayout) -> Mapping[str, str]:
    """Return the names in the files of the model's tensors, by their names in the model."""
    stored = {place.target: name for name, place in layout.tensors.items() if place.shape is not None}
    for name, linear in layout.linears.items():
        stored[f"{linear.module}.weight"] = linear.source
        stored[f"{linear.module}.bias"] = f"{name}.bias"
    for experts in layout.experts:
        for matrix in () if experts.fused is None else (experts.fused.gate_up, experts.fused.down):
            for tensor in (*matrix.tensors, *matrix.biases):
                stored[f"{experts.module}.{tensor.rpartition('.')[2]}"] = tensor
    return stored


def refuse_too_large(
    folder: Path, weights: WeightBytes, reserve_bytes: int | None = None, ranks: Ranks | None = None
) -> None:
    """Raise NotEnoughMemory if the weights do not fit into the free memory.

    All ranks call it before any of them reads weights: those of one host share its memory.

    Args:
        folder: of the checkpoint.
        weights: of this rank.
        reserve_bytes: memory that has to be left when all weights are in memory, mapped ones too; None if mapped ones
            may be dropped and read again.
        ranks: that the model is spread over.
    """
    is_on = settings.MEMORY_CHECK.is_on()
    reserve = 0 if reserve_bytes is None else reserve_bytes
    needed = reserve + weights.whole - (weights.mapped if reserve_bytes is None else 0)
    free = available_bytes()
    together = ""
    if ranks is not None:
        numbers = ranks.gather_numbers([_host(), needed, free, int(is_on)])
        here = [(theirs, left) for host, theirs, left, _ in numbers if host == _host()]
        is_on = all(checks for *_, checks in numbers)  # all ranks load, or none
        needed, free = sum(theirs for theirs, _ in here), min(left for _, left in here)
        together = f", {size_text(needed)} for the {len(here)} ranks of this host" if len(here) > 1 else ""
    if needed <= free or not is_on:
        return
    mapped = f"; {size_text(weights.mapped)} of these are mapped from files" if weights.mapped else ""
    left = f", and {size_text(reserve)} have to be left free" if reserve else ""
    raise NotEnoughMemory(
        f"{folder}: the weights take {size_text(weights.whole)} of memory ({size_text(weights.packed)} packed, "
        f"{size_text(weights.floats)} in float{mapped}){left}{together}; {size_text(free)} are free. Free memory, or "
        f"choose a scheme with fewer bits, or set {settings.MEMORY_CHECK.name}=0 to load the model nevertheless"
    )


def _host() -> int:
    """A number that ranks have in common which share memory and its limits."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{platform.node()} {boot.read_text() if boot.exists() else ''}"  # containers of one machine differ in name
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
