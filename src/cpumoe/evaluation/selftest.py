"""A quick check, for ``cpumoe doctor``, that every kernel of this machine gives the same bits as the scalar one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.cpu import instruction_sets
from cpumoe.layers.experts import Experts
from cpumoe.layers.routing import select_experts

_SCHEMES = ("w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w8a8")


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Runs the block on the kernels of one instruction set, then goes back to the default."""
    _core.use_isa(name)
    try:
        yield
    finally:
        _core.use_isa("")


@dataclass(frozen=True)
class SelfTest:
    """The result for one kernel: the schemes whose output differs from that of the scalar kernel."""

    isa: str
    failed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failed


def _outputs(scheme: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    num_experts, hidden, inner = 6, 256, 128
    gate_up = torch.randn((num_experts, 2 * inner, hidden), generator=generator)
    down = torch.randn((num_experts, hidden, inner), generator=generator)
    layer = Experts.quantize(gate_up, down, scheme, backend="native")
    outputs = []
    for tokens in (1, 5, 70):  # one token, a few rows per expert, full tiles
        x = torch.randn((tokens, hidden), generator=generator)
        weights, ids = select_experts(torch.randn((tokens, num_experts), generator=generator), 2)
        outputs.append(layer(x, ids, weights))
    return outputs


def run_self_tests() -> list[SelfTest]:
    """One result per instruction set that this machine supports."""
    with using_isa("scalar"):
        expected = {scheme: _outputs(scheme) for scheme in _SCHEMES}
    results = []
    for isa in (entry.name for entry in instruction_sets() if entry.supported):
        with using_isa(isa):
            failed = tuple(
                scheme for scheme in _SCHEMES if not all(map(torch.equal, _outputs(scheme), expected[scheme]))
            )
        results.append(SelfTest(isa, failed))
    return results
