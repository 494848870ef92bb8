"""What one rank reads of a stored tensor, found by comparing it with the tensor of a smaller linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cpumoe.errors import UnsupportedScheme


@dataclass(frozen=True)
class TensorPart:
    """What is read of a stored tensor: along one of its dimensions equal ranges, which are held one after another.

    Attributes:
        shape: of what is read.
        axis: the dimension that is cut.
        starts: where the ranges begin along it. Several where gate and up rows are in one tensor.
    """

    shape: tuple[int, ...]
    axis: int = 0
    starts: tuple[int, ...] = (0,)

    def ranges(self, out: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """For each range the place where it begins in the stored tensor, and where it goes in ``out`` [shape]."""
        size = self.shape[self.axis] // len(self.starts)
        for index, start in enumerate(self.starts):
            place = [start if axis == self.axis else 0 for axis in range(len(self.shape))]
            yield place, out.narrow(self.axis, index * size, size)

    def text(self, name: str, whole: tuple[int, ...]) -> str:
        """How messages call the part of the tensor ``name``, in which the places count that they speak of."""
        if self.shape == whole:
            return name
        size = self.shape[self.axis] // len(self.starts)
        ranges = " and ".join(f"{start}:{start + size}" for start in self.starts)
        return f"{name}[{':, ' * self.axis}{ranges}]"


def slice_of(
    whole: tuple[int, ...], smaller: tuple[int, ...], before: tuple[int, ...], row_blocks: int = 1
) -> TensorPart:
    """The part of a stored tensor that belongs to a slice.

    Args:
        whole: the shape that it has.
        smaller: the shape that it would have in a linear of the size of a slice: where the two differ, it is cut. What
            does not differ, such as a scale for all of a linear, every slice needs whole.
        before: the shape that it would have in a linear of what lies before the slice.
        row_blocks: 2 where the dimension that is cut has gate rows before up rows, of which each has its slice.
    """
    cut = [axis for axis, sizes in enumerate(zip(whole, smaller, strict=True)) if sizes[0] != sizes[1]]
    if not cut:
        return TensorPart(whole)
    (axis, *others) = cut
    if others or before[axis] + smaller[axis] > whole[axis] or any(s[axis] % row_blocks for s in (smaller, before)):
        raise UnsupportedScheme(
            f"a stored tensor {list(whole)} has no slice of {list(smaller)} after {list(before)}; expert parallelism, "
            "which leaves experts whole, is accepted"
        )
    each, first = (shape[axis] // row_blocks for shape in (whole, before))
    return TensorPart(smaller, axis, tuple(block * each + first for block in range(row_blocks)))
