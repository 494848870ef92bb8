"""kt-kernel, measured beside cpumoe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from peer import PER_CHANNEL, LayerWeights, Peer, PreparedPeer, repeated, sentence, weights_per_expert
from torch import Tensor

from cpumoe import _core
from cpumoe.bench.measure import Call
from cpumoe.bench.shapes import Shape

_KT_CHUNK = 4096  # tokens that fit into its buffers


class KtKernelPeer(Peer):
    """kt-kernel's AMXINT4: int4 weights, a scale per channel, int8 activations; AVX-512 where AMX is missing.

    Its Python wrapper needs page-locked memory, which exists only with an accelerator, and leaves quantised weights on
    disk. So the compiled module is called here, in the same way as by that wrapper.
    """

    name = "kt-kernel"
    packages = ("kt_kernel",)
    building = 4.0  # for the layer in bf16

    def own_obstacle(self, shape: Shape) -> str | None:
        if shape.activation != "silu":
            return f"activation {shape.activation!r}; AMXINT4 has silu only"
        inner = shape.intermediate // len(_numa_nodes())
        if shape.hidden % 128 or inner % 128 or shape.intermediate % len(_numa_nodes()):
            return f"sizes {shape.hidden} and {inner} (one NUMA node's share); AMXINT4 takes multiples of 128"
        try:
            import kt_kernel
        except ImportError as error:
            return f"kt-kernel cannot be imported: {sentence(error)}"
        if hasattr(kt_kernel.kt_kernel_ext.moe, "AMXInt4_MOE"):
            return None
        return f"kt-kernel has no AMXINT4 for this CPU; it loaded its {kt_kernel.__cpu_variant__} variant"

    def remark(self) -> str | None:
        threads, cpus = _core.thread_count(), _core.available_cpus()
        if threads < cpus:
            return None
        return (
            f"a thread that spins while it waits shares {cpus} CPUs with the {threads} that compute; "
            "short calls end on ticks of the scheduler"
        )

    def bytes_per_expert(self, shape: Shape) -> float:
        return weights_per_expert(shape) / 2 + 4 * (2 * shape.intermediate + shape.hidden)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        from kt_kernel import kt_kernel_ext

        nodes, threads = _numa_nodes(), _core.thread_count()
        config = kt_kernel_ext.WorkerPoolConfig()
        config.subpool_count = len(nodes)
        config.subpool_numa_map = nodes
        config.subpool_thread_count = [(threads + i) // len(nodes) for i in range(len(nodes))]
        workers = kt_kernel_ext.CPUInfer(config)
        gate_up, down = LayerWeights.random(shape, PER_CHANNEL, 0).bf16()
        source = [repeated(few, shape) for few in (*gate_up.chunk(2, 1), down)]
        calls = [self._call(shape, workers, source, layer) for layer in range(self.copies(shape))]
        return self.prepared(shape, str(PER_CHANNEL), calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, workers: Any, source: list[Tensor], layer: int) -> Call:
        from kt_kernel import kt_kernel_ext

        config = kt_kernel_ext.moe.MOEConfig(shape.num_experts, shape.topk, shape.hidden, shape.intermediate)
        config.layer_idx = layer
        config.pool = workers.backend_
        config.max_len = _KT_CHUNK
        config.save = config.load = False  # no files: it quantises from memory
        config.gate_proj, config.up_proj, config.down_proj = (part.data_ptr() for part in source)
        moe = kt_kernel_ext.moe.AMXInt4_MOE(config)
        order = torch.arange(shape.num_experts)
        workers.submit(moe.load_weights_task(order.data_ptr()))
        workers.sync()

        def call(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = hidden_states.to(torch.bfloat16).contiguous()
            ids, weights = topk_ids.to(torch.int64).contiguous(), topk_weights.to(torch.float32).contiguous()
            out = torch.empty_like(x)
            for start in range(0, x.shape[0], _KT_CHUNK):  # with more tokens than fit it overwrites other memory
                count = torch.tensor([min(_KT_CHUNK, x.shape[0] - start)], dtype=torch.int32)
                pointers = (tensor[start:].data_ptr() for tensor in (ids, weights, x, out))
                workers.submit(moe.forward_task(count.data_ptr(), shape.topk, *pointers, False))
                workers.sync()
            return out.to(hidden_states.dtype)

        return call


def _numa_nodes() -> list[int]:
    """NUMA nodes of the CPUs that this process may use."""
    cpus = (Path(f"/sys/devices/system/cpu/cpu{cpu}") for cpu in os.sched_getaffinity(0))
    nodes = {int(link.name.removeprefix("node")) for cpu in cpus for link in cpu.glob("node[0-9]*")}
    return sorted(nodes)[: _core.thread_count()] or [0]
