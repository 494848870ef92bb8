"""Samples of test parameters: of products, and those that `make test` leaves to `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled_product(*axes: Sequence[Any]) -> list[Any]:
    """Return combinations of the values of the axes as test parameters: as few as have every value once.

    A value that is a tuple stands for several parameters.
    """
    longest = max(len(axis) for axis in axes)
    found = []
    for index in range(longest):
        places = _places(index, axes, longest)
        values = itertools.chain(*(_as_tuple(axis[place]) for axis, place in zip(axes, places, strict=True)))
        found.append(pytest.param(*values))
    return found


def first_of(values: Sequence[Any], count: int, all_values: Iterable[Any] = ()) -> list[Any]:
    """Return values, then others of ``all_values``, as test parameters; those after ``count`` are marked ``full``."""
    ordered = [*values, *(value for value in all_values if value not in values)]
    return [
        pytest.param(*_as_tuple(value), marks=[] if place < count else pytest.mark.full)
        for place, value in enumerate(ordered)
    ]


def _places(index: int, axes: Sequence[Sequence[Any]], longest: int) -> tuple[int, ...]:
    """Return a place on each axis: ``index`` on the longest, its digits on the others, so that these vary apart."""
    found, rest = [], index
    for axis in axes:
        found.append(index if len(axis) == longest else rest % len(axis))
        rest = rest if len(axis) == longest else rest // len(axis)
    return tuple(found)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
