"""Slices of experts whose linears are stored one by one, in activation order (see ``layers/regrouping.py``)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from cpumoe.checkpoints.expert_sources import Buffers, QuantizedPerExpert
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.checkpoints.tensor_parts import TensorPart, slice_of
from cpumoe.errors import CheckpointError
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.regrouping import Regrouping, regrouped_size
from cpumoe.layers.scheme import GroupShape


class RegroupedPerExpert(QuantizedPerExpert):
    """A slice of each expert: weights of the slice, and of ``down`` the scales and zero points of all groups.

    ``config`` has the inputs of ``down`` that there are when groups are filled up, which the files tell: it reads the
    groups of all experts that are held when it is first asked for.
    """

    @property
    def _group_index(self) -> str:
        assert self.storage.group_index_suffix is not None  # the caller has looked
        return self.storage.group_index_suffix

    @property
    def _group_size(self) -> int:
        assert self.storage.scheme.group_size is not None  # the caller has looked
        return self.storage.scheme.group_size

    @property
    def _group_count(self) -> int:
        return self.layout.shape.intermediate_size // self._group_size

    @cached_property
    def config(self) -> MoEConfig:
        groups = [self._groups(self.linear_names(expert)[-1]) for expert in dict.fromkeys(self.part.experts)]
        return replace(self._config, intermediate_size=regrouped_size(torch.stack(groups), self._group_count))

    def _parts(self, stored: tuple[int, int], read: tuple[int, int], before: tuple[int, int]) -> dict[str, TensorPart]:
        if stored[1] == read[1]:  # gate and up, whose rows are cut
            return super()._parts(stored, read, before)
        # What is cut with the inputs is what differs even where a row has one scale: weights, and groups of inputs.
        scheme = self.storage.scheme
        per_row = replace(scheme, weights=replace(scheme.weights, group=GroupShape.per_row()))
        one_group = replace(self.storage, scheme=per_row)
        larger, smaller, missed = (one_group.tensors(*size) for size in (stored, read, before))
        cut = {suffix for suffix, tensor in larger.items() if tensor.shape != smaller[suffix].shape}
        return {
            suffix: slice_of(tensor.shape, smaller[suffix].shape, missed[suffix].shape)
            if suffix in cut
            else TensorPart(tensor.shape)
            for suffix, tensor in self._accepted_tensors(*stored).items()
        }

    @property
    def expert_bytes(self) -> int:
        # A byte for each weight while they are sorted, and twice.
        shape = self.layout.shape
        weights = (shape.gate_up_rows + shape.intermediate_size) * shape.hidden_size // self.part.slices
        return super().expert_bytes + 3 * weights

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        (of_gate_up, of_down), tensors = self._blocks, self._read_blocks(first, count, buffers)
        gate_up = self._held(of_gate_up, tensors[0])
        stored = tensors[1].pop(self._group_index)[:, 0]  # [count, inputs of the slice]
        groups = torch.stack([self._set_groups(found) for found in stored])
        for expert, found in zip(self.part.experts[first : first + count], groups, strict=True):
            self._check_groups(f"{self.linear_names(expert)[-1]}.{self._group_index}", found)
        down = self.storage.without_order().decode(tensors[1], of_down.rows, of_down.columns)
        places = Regrouping.of(groups, self._group_count, self.config.intermediate_size)
        return QuantizedExperts(
            places.rows_of(gate_up, of_gate_up.count),
            places.columns_of(replace(down, bias=tensors[1].get("bias"))),
        )

    def _groups(self, linear: str) -> Tensor:
        """The groups of the slice's inputs."""
        name, (_, block) = f"{linear}.{self._group_index}", self._blocks
        stored, part = block.tensors[self._group_index], block.parts[self._group_index]
        groups = torch.zeros(part.shape, dtype=DTYPES[stored.dtypes[0]])
        info = self.checkpoint.info(name) if name in self.checkpoint else None
        if info is None or info.shape != stored.shape or info.dtype not in stored.dtypes:
            return groups  # a check of the tensors has more to say of it
        self._read_tensor(name, stored, part, groups)
        groups = self._set_groups(groups)
        self._check_groups(name, groups)
        return groups

    def _set_groups(self, groups: Tensor) -> Tensor:
        """Return the groups of the slice's inputs where the index was never set: then they are in their own order."""
        if not bool((groups == -1).all()):
            return groups
        first, count = self.cuts[1]
        return (torch.arange(first, first + count) // self._group_size).to(groups.dtype).reshape(groups.shape)

    def _check_groups(self, name: str, groups: Tensor) -> None:
        """Refuses groups that there are not, and more inputs of one than there may be."""
        where = self._blocks[1].parts[self._group_index].text(name, self._blocks[1].tensors[self._group_index].shape)
        outside = ((groups < 0) | (groups >= self._group_count)).nonzero()
        if len(outside):
            at = int(outside[0])
            raise CheckpointError(
                f"{where} has input {at} in group {int(groups[at])}; 0 to {self._group_count - 1} are accepted"
            )
        sizes = torch.bincount(groups.long(), minlength=self._group_count)
        if int(sizes.amax()) > self._group_size:
            at = int(sizes.argmax())
            raise CheckpointError(
                f"{where} has {int(sizes[at])} inputs in group {at}; up to {self._group_size} are accepted"
            )
