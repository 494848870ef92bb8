"""What ranks do in test_rank_plan.py."""

from __future__ import annotations

import cpumoe
from cpumoe import ParallelLayout
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.integrations.transformers.facade import describe
from cpumoe.parallel.rank_plan import plan_ranks
from cpumoe.parallel.ranks import Ranks

_LAYOUTS = (
    ParallelLayout(tp_size=4, expert_parallel=True),
    ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True),
    ParallelLayout(dp_size=4, expert_parallel=True),
    ParallelLayout(tp_size=4, expert_parallel=True, sequence_parallel=True),
)


def held(folder: str) -> list[tuple[str, int, int]]:
    """For every layout its name, the bytes planned for this rank, and those that it holds when it has loaded."""
    found = []
    for layout in _LAYOUTS:
        ranks = Ranks.join(layout)
        with Checkpoint.open(folder) as checkpoint:
            planned = plan_ranks(Survey(checkpoint, describe), layout).ranks[ranks.rank]
        model = cpumoe.load_model(folder, ranks=ranks)
        stored = [tensor for name, tensor in model.named_buffers() if not name.endswith("inv_freq")]
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *stored)}  # tied ones once
        found.append((str(layout), planned.bytes, sum(tensors.values())))
    return found
