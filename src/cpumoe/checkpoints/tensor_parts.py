"""What one rank reads of a stored tensor, found by comparing it with the tensor of a smaller linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.parallel_layout import ExpertsPart


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


def slice_of(whole: tuple[int, ...], smaller: tuple[int, ...], part: ExpertsPart, row_blocks: int = 1) -> TensorPart:
    """The part of a stored tensor that belongs to a slice.

    Args:
        whole: the shape that it has.
        smaller: the shape that it would have in a linear of the size of a slice: where the two differ, it is cut. What
            does not differ, such as a scale for all of a linear, every slice needs whole.
        part: says which slice.
        row_blocks: 2 where the dimension that is cut has gate rows before up rows, of which each has its slice.
    """
    cut = [axis for axis, sizes in enumerate(zip(whole, smaller, strict=True)) if sizes[0] != sizes[1]]
    if not cut:
        return TensorPart(whole)
    if len(cut) > 1 or smaller[cut[0]] * part.slices != whole[cut[0]] or smaller[cut[0]] % row_blocks != 0:
        raise UnsupportedScheme(
            f"a stored tensor {list(whole)} does not divide into {part.slices} slices of {list(smaller)}; expert "
            "parallelism, which leaves experts whole, is accepted"
        )
    (axis,) = cut
    each, size = whole[axis] // row_blocks, smaller[axis] // row_blocks
    return TensorPart(smaller, axis, tuple(block * each + part.slice * size for block in range(row_blocks)))
