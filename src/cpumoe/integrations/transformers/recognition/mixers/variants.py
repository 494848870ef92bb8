"""What the names of an attention's parts do not tell, to be found by trying."""

from __future__ import annotations

from dataclasses import dataclass

#: Names of the norm of queries.
QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")


@dataclass(frozen=True)
class Choices:
    """What cannot be seen of a layer's parts, to be found by trying.

    ``rotates``: whether positions are in queries and keys. ``interleaved`` and ``separated``: see
    :class:`cpumoe.ops.decoder.Rope` and :class:`cpumoe.ops.decoder.Gqa`.
    """

    interleaved: bool = False
    norms_after_rotary: bool = False
    rotates: bool = True
    separated: bool = False
