"""Activation order: scales that belong to inputs that do not lie side by side, told by a group for every input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cpumoe.errors import CheckpointError


def input_order_of(group_index: Tensor) -> Tensor:
    """Return the inputs of a linear, listed group by group; inside a group they keep their order.

    Args:
        group_index: [..., in] int32, the group of every input (``g_idx``), as :func:`refuse_no_grouping` accepts it. An
            index of -1 throughout was never set: all sort equal, so inputs keep their own order.
    """
    return group_index.argsort(dim=-1, stable=True).to(torch.int32)


def own_order(inputs: int, group_size: int | None) -> Tensor:
    """Return the group of every input [in] int32 where neighbouring inputs are one group."""
    return (torch.arange(inputs) // (group_size or inputs)).to(torch.int32)


def is_own_order(group_index: Tensor, group_size: int | None) -> bool:
    """Return whether an index [in] leaves inputs in their own order.

    compressed-tensors fills an index with -1 before calibration, and its readers take that for the own order.
    """
    return bool((group_index == -1).all()) or torch.equal(group_index, own_order(len(group_index), group_size))


def refuse_no_grouping(name: str, group_index: Tensor, group_size: int | None) -> None:
    """Raise CheckpointError if the index ``name`` [in] has groups that are absent, or a group of another size."""
    if bool((group_index == -1).all()):
        return
    wanted = torch.bincount(own_order(len(group_index), group_size).long())
    outside = ((group_index < 0) | (group_index >= len(wanted))).nonzero()
    if len(outside):
        at = int(outside[0])
        raise CheckpointError(
            f"{name} has input {at} in group {int(group_index[at])}; 0 to {len(wanted) - 1} are accepted"
        )
    sizes = torch.bincount(group_index.long(), minlength=len(wanted))
    wrong = (sizes != wanted).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise CheckpointError(f"{name} has {int(sizes[at])} inputs in group {at}; {int(wanted[at])} are accepted")


def grouping_check(inputs: int, group_size: int | None) -> Callable[[str, Tensor], None]:
    """Return :func:`refuse_no_grouping` for the index of a linear, as ``StoredTensor.contents`` takes it.

    A slice of the index has some inputs of each group: its reader, which knows the slice, checks it.
    """

    def check(name: str, group_index: Tensor) -> None:
        if group_index.numel() == inputs:
            refuse_no_grouping(name, group_index.reshape(-1), group_size)

    return check


def plain_input_order(group_index: Tensor) -> Tensor:
    """The same for one linear [in], spelled out and unchecked: [1, in] int32, for comparison with the other."""
    groups = group_index.tolist()
    return torch.tensor([sorted(range(len(groups)), key=groups.__getitem__)], dtype=torch.int32)


def group_index_of(input_order: Tensor | None, inputs: int, group_size: int | None) -> Tensor:
    """The reverse: the group of every input [in] int32, from one order [1, in]; None: inputs in their own order."""
    groups = torch.arange(inputs, dtype=torch.int32) // (group_size or inputs)
    return groups if input_order is None else torch.empty_like(groups).scatter_(0, input_order[0].long(), groups)
