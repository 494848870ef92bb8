"""What workers exchange that have slices of the same experts.

Activations between the two products of an expert have a scale for each token. A worker sees its slice of them alone, so
that each would find a scale of its own, and the result would be another than that of one worker: they agree on the
extremes of every row.
"""

from __future__ import annotations

from functools import cache

from vllm.distributed import get_ep_group, get_tp_group

from cpumoe.integrations.vllm import settings
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.parallel.ranks import Ranks

#: Seconds that workers wait for each other. One may compile its model for long while another has done so; of one that
#: has ended, the others hear at once, and of one that hangs vLLM does.
_PATIENCE = 1800.0


@cache  # one for all layers; kept for as long as the process lives
def _ranks(slices: int) -> Ranks:
    tensor_parallel = get_tp_group()
    # Data parallel workers have slices of the same experts too, and the tokens of all: the experts' group is theirs.
    group = tensor_parallel if tensor_parallel.world_size == slices else get_ep_group()
    if group.world_size != slices:
        raise RuntimeError(f"{slices} slices of experts, and no group of as many workers")
    ranks = Ranks.join(ParallelLayout(tp_size=slices), group=group.cpu_group, timeout=_PATIENCE)
    ranks.agree("environment", *settings.of_results())
    return ranks


def exchange_of_slices(slices: int) -> int:
    """The number of the exchange between as many workers, for operators; all of them have to call it."""
    return _ranks(slices).number
