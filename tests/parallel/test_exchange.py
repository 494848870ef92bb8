"""Messages between real processes: through shared memory, and carried by torch.distributed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from exchange_cases import SLOT_BYTES
from rank_processes import refuse_failures, run_ranks
from sampling import first_of

from cpumoe.ops.exchange import CarriedExchange, SharedExchange


@pytest.mark.parametrize(("ranks", "turns"), first_of([(2, 1000), (4, 300), (1, 100)], 1))
def test_messages_through_shared_memory(ranks: int, turns: int, tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(SharedExchange.file_bytes(ranks, SLOT_BYTES)))
    refuse_failures(run_ranks(ranks, "exchange_cases:through_shared_memory", str(path), turns))


@pytest.mark.parametrize(("ranks", "turns"), first_of([(2, 100), (4, 50)], 1))
def test_messages_through_torch_distributed(ranks: int, turns: int) -> None:
    """The same cases, sums in the same order: what carries the messages does not change a bit."""
    refuse_failures(run_ranks(ranks, "exchange_cases:through_gloo", turns))


def test_a_cycle_through_an_exchange_is_collected() -> None:
    class Carrier:
        def carry(self, *_: object) -> None: ...

    carrier = Carrier()
    carry = carrier.carry
    carrier.exchange = CarriedExchange(0, 1, carry, carry, carry, carry)  # type: ignore[attr-defined]
    gone = weakref.ref(carrier)
    del carrier, carry
    gc.collect()
    assert gone() is None
