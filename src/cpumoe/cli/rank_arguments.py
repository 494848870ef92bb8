"""Options of commands that run on several ranks: the layout, and joining the ranks that ``torchrun`` has started."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from cpumoe import _core, cpu, settings
from cpumoe.cli.arguments import positive, refuse_given
from cpumoe.layers.parallel_layout import Exchange, ExpertPlacement, ParallelLayout
from cpumoe.option_values import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from cpumoe.parallel.ranks import Ranks


def add_layout_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the sizes of a layout."""
    sizes = parser.add_argument_group("the layout")
    sizes.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks that are tensor parallel (1)")
    sizes.add_argument("--dp", type=positive, default=1, metavar="N", help="ranks that are data parallel (1)")
    sizes.add_argument("--pcp", type=positive, default=1, metavar="N", help="ranks that share out a prompt (1)")
    sizes.add_argument("--ep", action="store_true", help="whole experts on every rank, not a slice of each")
    sizes.add_argument(
        "--expert-placement-strategy",
        choices=[placement.value for placement in ExpertPlacement],
        help="with --ep: consecutive experts on a rank, or every n-th of n ranks (linear)",
    )
    sizes.add_argument("--sp", action="store_true", help="ranks of a tensor parallel group have different tokens")
    sizes.add_argument("--exchange", choices=[e.value for e in Exchange], help="how tokens travel (by the layout)")
    return sizes


def layout_of(arguments: argparse.Namespace) -> ParallelLayout:
    """The layout that the arguments name, as its first rank has it."""
    if arguments.tp * arguments.dp * arguments.pcp == 1:
        refuse_given(arguments, "with one rank", "ep", "exchange", "expert_placement_strategy")
    if not arguments.ep:
        refuse_given(arguments, "without --ep", "expert_placement_strategy")
    if arguments.tp == 1:
        refuse_given(arguments, "with --tp 1: there is no group whose tokens could be shared out", "sp")
    return ParallelLayout(
        tp_size=arguments.tp,
        dp_size=arguments.dp,
        pcp_size=arguments.pcp,
        expert_parallel=arguments.ep,
        sequence_parallel=arguments.sp,
        exchange=None if arguments.exchange is None else Exchange(arguments.exchange),
        expert_placement_strategy=ExpertPlacement(arguments.expert_placement_strategy or ExpertPlacement.LINEAR.value),
    )


def add_rank_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the layout of a model that runs on several ranks, and what joining them takes."""
    group = add_layout_arguments(parser)
    group.title = "several ranks (torchrun --nproc-per-node N -m cpumoe ...); without sizes all are tensor parallel"
    group.add_argument(
        "--rank-timeout",
        type=positive,
        default=int(DEFAULT_TIMEOUT),
        metavar="SECONDS",
        help=f"after which a rank that gives nothing is an error ({DEFAULT_TIMEOUT:g})",
    )
    return group


def join_ranks(arguments: argparse.Namespace) -> Ranks:
    """The ranks that were started together; one, if this process was started alone."""
    from cpumoe.parallel.ranks import Ranks

    if arguments.pcp > 1:
        raise ValueError(
            f"--pcp {arguments.pcp}; prompts are not shared out over ranks in whole models. --tp N, which splits heads "
            "and linears, and --dp N, where ranks have requests of their own, are accepted"
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and arguments.tp * arguments.dp == 1:
        arguments.tp = size
    layout = layout_of(arguments)
    if size > 1:
        _share_out_threads()
    return Ranks.join(layout, timeout=arguments.rank_timeout)


def _share_out_threads() -> None:
    """Gives each rank of this machine its share of the CPUs; torchrun leaves it one thread."""
    if settings.NUM_THREADS.get() is None and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cpu.set_num_threads(max(1, _core.available_cpus() // ranks_here))
