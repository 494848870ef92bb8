"""Layouts of device meshes, on four ranks; see ``rank_processes.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpumoe import ParallelLayout
from cpumoe.parallel.ranks import Ranks, layout_of_mesh


def run() -> list[str]:
    """What was refused; layouts that were made are compared here."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layout = layout_of_mesh(mesh, expert_parallel=True)
    assert layout == ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True).of_rank(rank)
    assert Ranks.join(layout).layout == layout
    assert layout_of_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))).tp_rank == rank
    refused = []
    for wrong in (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
        init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]), mesh_dim_names=("tp",)),
    ):
        try:
            layout_of_mesh(wrong)
        except ValueError as problem:
            refused.append(str(problem))
    group = dist.new_group([0, 1])
    if rank < 2:  # a part of all processes
        ranks = Ranks.join(ParallelLayout(tp_size=2), group=group)
        assert ranks.gather_numbers([rank]) == [[0], [1]]
    return refused
