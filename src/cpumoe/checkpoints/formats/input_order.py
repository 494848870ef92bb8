"""Activation order: scales that belong to inputs that do not lie side by side, told by a group for every input."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe.errors import CheckpointError


def input_order_of(group_index: Tensor, group_size: int | None, name: str) -> Tensor:
    """The inputs of a linear, listed group by group.

    Args:
        group_index: [..., in] int32, the group of every input (``g_idx``).
        group_size: inputs of each group; None: all are in one.
        name: of the tensor, for messages.

    Returns:
        [..., in] int32. Inside of a group inputs keep their order. Raises CheckpointError if the index is no grouping.
    """
    inputs = group_index.shape[-1]
    order: Tensor = group_index.argsort(dim=-1, stable=True)
    expected = torch.arange(inputs) // (group_size or inputs)
    found = group_index.gather(-1, order)
    if not bool((found == expected).all()):
        wrong = found != expected
        place = int(wrong.nonzero()[0][-1])
        raise CheckpointError(
            f"{name} is not a grouping: sorted, it has {int(found[wrong][0])} at {place}, where {int(expected[place])} "
            f"is accepted ({int(expected[-1]) + 1} groups of {group_size or inputs} inputs)"
        )
    return order.to(torch.int32)


def plain_input_order(group_index: Tensor) -> Tensor:
    """The same for one linear [in], spelled out and unchecked: [1, in] int32, for comparison with the other."""
    groups = group_index.tolist()
    return torch.tensor([sorted(range(len(groups)), key=groups.__getitem__)], dtype=torch.int32)


def group_index_of(input_order: Tensor | None, inputs: int, group_size: int | None) -> Tensor:
    """The reverse: the group of every input [in] int32, from one order [1, in]; None: inputs in their own order."""
    groups = torch.arange(inputs, dtype=torch.int32) // (group_size or inputs)
    return groups if input_order is None else torch.empty_like(groups).scatter_(0, input_order[0].long(), groups)
