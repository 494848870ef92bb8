"""Tables of text."""

from __future__ import annotations

import pytest

from cpumoe.tables import aligned, size_text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("name", "ms", "remark"), ("a", "12.5", ""), ("longest", "7", "slow")]
    assert aligned(rows, right=(1,)) == ["name       ms  remark", "a        12.5", "longest     7  slow"]
    assert aligned(rows, right=(1,), indent=2)[2] == "  longest     7  slow"
    assert aligned([]) == []


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5e6, "5.0 MB"), (20 * 10**9, "20.0 GB")]
)
def test_sizes_have_a_unit(count: float, text: str) -> None:
    assert size_text(count) == text
