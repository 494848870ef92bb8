"""Other systems on the same routing, weights in memory and threads, for rows beside cpumoe's own.

Every system is asked for an obstacle first: a package that is missing, a shape it does not serve, too little
memory. Packages are imported only when they are used, and none is a dependency of cpumoe.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cpumoe import _core, reference
from cpumoe.activation import Activation
from cpumoe.bench.measure import Call, Limits, Row, make_inputs, make_row, mean_active_experts, time_calls
from cpumoe.bench.workload import ROTATED_BYTES, Shape, fitting_scheme, random_values
from cpumoe.errors import UnsupportedScheme
from cpumoe.experts import Experts
from cpumoe.quantize import pack_nibbles
from cpumoe.scheme import Scheme

Report = Callable[[str], None]  # takes a sentence

_GROUPED = Scheme.parse("w4a8-g128")
_PER_CHANNEL = Scheme.parse("w4a8")
_DISTINCT = 4  # experts with values of their own, which the others repeat: addresses matter here, not values
_PROBE_BYTES = 256 << 20
_PATIENCE = 60.0  # seconds that one row may take, whatever the budget
_FEWEST_CALLS = 7  # that time_calls makes
_SETTLE = 0.1  # seconds after which a system's waiting threads have stopped spinning (kt-kernel: 50 ms)
_KT_CHUNK = 4096  # tokens that kt-kernel's buffers are made for


@dataclass(frozen=True)
class PreparedPeer:
    """A system with its weights loaded: one call per copy of the layer, to be taken in turn."""

    scheme: str
    calls: list[Call]
    bytes_per_expert: float


class Peer(ABC):
    """Another system. ``obstacle`` gives the first reason against running it here, or None."""

    name: str
    packages: tuple[str, ...] = ()  # that must be importable
    building = 0.0  # memory that building the copies takes for a while, in copies

    def obstacle(self, shape: Shape) -> str | None:
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"package {package.replace('_', '-')} is not installed"
        if (reason := self.own_obstacle(shape)) is not None:
            return reason
        needed = self.bytes_per_expert(shape) * shape.experts * (1 + self.building)
        free = _available_bytes()
        return None if needed <= free else f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"

    def own_obstacle(self, shape: Shape) -> str | None:
        """The reason that only this system knows; its packages are there."""
        return None

    def remark(self) -> str | None:
        """What a reader of the rows must know about this system on this machine."""
        return None

    def copies(self, shape: Shape) -> int:
        """As many as exceed the caches, two at least as for cpumoe's own rows, but no more than fit."""
        one = self.bytes_per_expert(shape) * shape.experts
        wanted, possible = math.ceil(ROTATED_BYTES / one), int(_available_bytes() / one - self.building)
        return max(1, min(max(2, wanted), possible))

    @abstractmethod
    def bytes_per_expert(self, shape: Shape) -> float:
        """Bytes of one expert as this system holds it."""

    @abstractmethod
    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        """Loads the copies. ``dtype`` is that of the hidden states and of the results."""


class TorchBf16Peer(Peer):
    """What a model does without any of these systems: a loop over the active experts, weights in bf16."""

    name = "torch-bf16"

    def bytes_per_expert(self, shape: Shape) -> float:
        return 2.0 * _weights_per_expert(shape)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        calls = [self._call(shape, seed) for seed in range(self.copies(shape))]
        return PreparedPeer("bf16", calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, seed: int) -> Call:
        gate_up, down = (
            _repeated(few, shape) for few in _LayerWeights.random(shape, _PER_CHANNEL, seed).bf16()
        )
        activation = Activation(shape.activation)

        def call(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = hidden_states.to(torch.bfloat16)
            out = torch.zeros_like(x)
            for expert in sorted(set(topk_ids.flatten().tolist())):
                token, slot = torch.where(topk_ids == expert)
                h = reference.apply_activation(F.linear(x[token], gate_up[expert]), activation)
                y = F.linear(h, down[expert])
                out.index_add_(0, token, y * topk_weights[token, slot].unsqueeze(-1).to(y.dtype))
            return out.to(hidden_states.dtype)

        return call


class AtenPeer(Peer):
    """PyTorch's own 4-bit product through cpumoe's aten backend."""

    name = "aten"
    building = 1.5  # the packed experts one by one before they are stacked, and the integers they come from

    def own_obstacle(self, shape: Shape) -> str | None:
        if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
            return f"PyTorch {torch.__version__} has no _dyn_quant_matmul_4bit"
        return _scheme_obstacle(shape)

    def bytes_per_expert(self, shape: Shape) -> float:
        # Where KleidiAI is missing PyTorch keeps every byte of two weights, and every scale, as a float.
        group = fitting_scheme(_GROUPED, shape).group_size or shape.hidden
        return 4.0 * _weights_per_expert(shape) * (1 / 2 + 1 / group)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        scheme = fitting_scheme(_GROUPED, shape)
        layers = []
        for seed in range(self.copies(shape)):
            few = _LayerWeights.random(shape, scheme, seed)
            parts = (few.gate_up, few.gate_up_scale, few.down, few.down_scale)
            gate_up, gate_up_scale, down, down_scale = (_repeated(part, shape) for part in parts)
            layers.append(
                Experts.from_quantized(
                    gate_up,
                    gate_up_scale,
                    down,
                    down_scale,
                    scheme,
                    activation=shape.activation,
                    backend="aten",
                )
            )
        calls: list[Call] = [layer.__call__ for layer in layers]
        return PreparedPeer(str(scheme), calls, layers[0].packed_bytes / shape.experts)


class OnnxRuntimePeer(Peer):
    """The QMoE operator of onnxruntime's CPU package: 4-bit weights in blocks, int8 activations."""

    name = "onnxruntime"
    packages = ("onnx", "onnxruntime")
    building = 4.0  # the model as built, as serialised and as read again, before the weights are packed

    def own_obstacle(self, shape: Shape) -> str | None:
        import onnxruntime

        if shape.activation not in ("silu", "swiglu_oai"):
            return f"activation {shape.activation!r}; QMoE on CPUs has silu and swiglu_oai with a gate"
        if (reason := _scheme_obstacle(shape)) is not None:
            return reason
        size = self.bytes_per_expert(shape) * shape.experts
        if size >= 2**31:
            return f"a model of {size / 1e9:.1f} GB; ONNX files end at 2 GB"
        try:  # a tiny layer: does this release have the operator with all that is asked of it here?
            self._call(Shape("tiny", 128, 128, 2, 1), _GROUPED, 0)
        except Exception as error:  # the package has an exception of its own for every status
            return f"onnxruntime {onnxruntime.__version__} cannot run QMoE as wanted: {_sentence(error)}"
        return None

    def bytes_per_expert(self, shape: Shape) -> float:
        # Once packed: half a byte per weight; per block a scale and the sum of the weights, both floats.
        group = fitting_scheme(_GROUPED, shape).group_size or shape.hidden
        return _weights_per_expert(shape) * (1 / 2 + 8 / group)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        scheme = fitting_scheme(_GROUPED, shape)
        calls = [self._call(shape, scheme, seed) for seed in range(self.copies(shape))]
        return PreparedPeer(str(scheme), calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, scheme: Scheme, seed: int) -> Call:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _core.thread_count()
        # Every copy has its own threads; those of the copy before must not spin while this one runs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        model = self._model(shape, scheme, seed)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        def call(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            # The operator chooses by one [tokens, experts] tensor and weighs by another. As the weights are
            # positive, one tensor serves for both and gives exactly the routing asked for.
            scores = torch.zeros((topk_ids.shape[0], shape.experts))
            scores.scatter_(1, topk_ids.to(torch.int64), topk_weights.to(torch.float32))
            routing = scores.numpy()
            x = hidden_states.to(torch.float32).numpy()
            (out,) = session.run(None, {"x": x, "choice": routing, "weight": routing})
            return torch.from_numpy(out).to(hidden_states.dtype)

        return call

    def _model(self, shape: Shape, scheme: Scheme, seed: int) -> bytes:
        """One QMoE node with its weights; gate and up rows alternate, as the operator wants them."""
        from onnx import TensorProto, helper, numpy_helper

        weights = _LayerWeights.random(shape, scheme, seed)
        tensors = {
            "gate_up": pack_nibbles(_alternating(weights.gate_up)),
            "gate_up_scale": _alternating(weights.gate_up_scale).to(torch.float32),
            "down": pack_nibbles(weights.down),
            "down_scale": weights.down_scale.to(torch.float32),
        }
        initializers = [
            numpy_helper.from_array(_repeated(t, shape).numpy(), name) for name, t in tensors.items()
        ]
        activation = Activation(shape.activation)
        plain = {"activation_alpha": 1.0, "activation_beta": 0.0}
        oai = {"activation_alpha": activation.alpha, "activation_beta": 1.0, "swiglu_limit": activation.limit}
        absent = [""] * 6  # no third product, no zero points
        node = helper.make_node(
            "QMoE",
            ["x", "choice", "gate_up", "gate_up_scale", "", "down", "down_scale", "", *absent, "weight"],
            ["out"],
            domain="com.microsoft",
            k=shape.topk,
            activation_type="swiglu",
            swiglu_fusion=1,  # gate and up in one product, rows alternating
            expert_weight_bits=4,
            block_size=scheme.group_size,
            accuracy_level=4,  # int8 activations
            normalize_routing_weights=0,
            **(plain if shape.activation == "silu" else oai),
        )

        def value(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width])

        inputs = [value("x", shape.hidden), value("choice", shape.experts), value("weight", shape.experts)]
        graph = helper.make_graph([node], "experts", inputs, [value("out", shape.hidden)], initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        serialised: bytes = model.SerializeToString()
        return serialised


class KtKernelPeer(Peer):
    """kt-kernel's AMXINT4: int4 weights, a scale per channel, int8 activations; AVX-512 where AMX is missing.

    Its Python wrapper takes page-locked memory, which exists only beside an accelerator, and leaves quantised
    weights on disk; so this calls the compiled module, as that wrapper does.
    """

    name = "kt-kernel"
    packages = ("kt_kernel",)
    building = 4.0  # the layer in bf16

    def own_obstacle(self, shape: Shape) -> str | None:
        if shape.activation != "silu":
            return f"activation {shape.activation!r}; AMXINT4 has silu only"
        inner = shape.intermediate // len(_numa_nodes())
        if shape.hidden % 128 or inner % 128 or shape.intermediate % len(_numa_nodes()):
            return f"sizes {shape.hidden} and {inner} (one NUMA node's share); AMXINT4 takes multiples of 128"
        try:
            import kt_kernel
        except ImportError as error:
            return f"kt-kernel cannot be imported: {_sentence(error)}"
        if hasattr(kt_kernel.kt_kernel_ext.moe, "AMXInt4_MOE"):
            return None
        return f"kt-kernel has no AMXINT4 for this CPU; it loaded its {kt_kernel.__cpu_variant__} variant"

    def remark(self) -> str | None:
        threads, cpus = _core.thread_count(), _core.available_cpus()
        if threads < cpus:
            return None
        return (
            f"one more thread, which spins while it waits, shares {cpus} CPUs with the {threads} that compute; "
            "short calls end on ticks of the scheduler"
        )

    def bytes_per_expert(self, shape: Shape) -> float:
        return _weights_per_expert(shape) / 2 + 4 * (2 * shape.intermediate + shape.hidden)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        from kt_kernel import kt_kernel_ext

        nodes, threads = _numa_nodes(), _core.thread_count()
        config = kt_kernel_ext.WorkerPoolConfig()
        config.subpool_count = len(nodes)
        config.subpool_numa_map = nodes
        config.subpool_thread_count = [(threads + i) // len(nodes) for i in range(len(nodes))]
        workers = kt_kernel_ext.CPUInfer(config)
        gate_up, down = _LayerWeights.random(shape, _PER_CHANNEL, 0).bf16()
        source = [_repeated(few, shape) for few in (*gate_up.chunk(2, 1), down)]
        calls = [self._call(shape, workers, source, layer) for layer in range(self.copies(shape))]
        return PreparedPeer(str(_PER_CHANNEL), calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, workers: Any, source: list[Tensor], layer: int) -> Call:
        from kt_kernel import kt_kernel_ext

        config = kt_kernel_ext.moe.MOEConfig(shape.experts, shape.topk, shape.hidden, shape.intermediate)
        config.layer_idx = layer
        config.pool = workers.backend_
        config.max_len = _KT_CHUNK
        config.save = config.load = False  # nothing on disk: quantise from memory
        config.gate_proj, config.up_proj, config.down_proj = (part.data_ptr() for part in source)
        moe = kt_kernel_ext.moe.AMXInt4_MOE(config)
        order = torch.arange(shape.experts)
        workers.submit(moe.load_weights_task(order.data_ptr()))
        workers.sync()

        def call(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = hidden_states.to(torch.bfloat16).contiguous()
            ids, weights = topk_ids.to(torch.int64).contiguous(), topk_weights.to(torch.float32).contiguous()
            out = torch.empty_like(x)
            for start in range(0, x.shape[0], _KT_CHUNK):  # beyond its buffers it writes over other memory
                count = torch.tensor([min(_KT_CHUNK, x.shape[0] - start)], dtype=torch.int32)
                pointers = (tensor[start:].data_ptr() for tensor in (ids, weights, x, out))
                workers.submit(moe.forward_task(count.data_ptr(), shape.topk, *pointers, False))
                workers.sync()
            return out.to(hidden_states.dtype)

        return call


PEERS: tuple[Peer, ...] = (TorchBf16Peer(), AtenPeer(), OnnxRuntimePeer(), KtKernelPeer())


def bench_peers(
    shape: Shape, tokens: list[int], dtype: torch.dtype, budget: float, report: Report
) -> Iterator[Row]:
    """Rows of the other systems for one shape. ``report`` hears of those left out or failing, and why."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(_core.thread_count())
    try:
        for peer in PEERS:
            try:
                with _stdout_to_stderr():
                    reason = peer.obstacle(shape)
                if reason is None:
                    yield from _bench_peer(peer, shape, tokens, dtype, budget, report)
                else:
                    report(f"{peer.name}: {reason}")
            except Exception as error:  # another system's failure must not cost the rows of the next
                report(f"{peer.name}: {_sentence(error)}")
    finally:
        torch.set_num_threads(torch_threads)


def _bench_peer(
    peer: Peer, shape: Shape, tokens: list[int], dtype: torch.dtype, budget: float, report: Report
) -> Iterator[Row]:
    memory = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    _core.advise_huge_pages(memory)  # as cpumoe's weights, which its own rows read for their probes
    memory.fill_(1)
    with _stdout_to_stderr():
        prepared = peer.prepare(shape, dtype)
    if (remark := peer.remark()) is not None:
        report(f"{peer.name}: {remark}")
    seconds_per_token = 0.0
    try:
        for count in tokens:
            expected = seconds_per_token * count
            if expected * _FEWEST_CALLS > max(_PATIENCE, budget):
                report(f"{peer.name}: {count} tokens left out; one call would take about {expected:.0f} s")
                continue
            inputs = make_inputs(shape, count, dtype)
            limits = Limits()

            def between(_: int, limits: Limits = limits) -> None:
                time.sleep(_SETTLE)
                limits.probe(memory)

            seconds = time_calls(prepared.calls, inputs, budget, between)
            seconds_per_token = statistics.median(seconds) / count
            weight_bytes = mean_active_experts(inputs) * prepared.bytes_per_expert
            yield make_row(peer.name, shape, prepared.scheme, count, seconds, weight_bytes, limits, "-")
    finally:
        with _stdout_to_stderr():
            del prepared


@dataclass(frozen=True)
class _LayerWeights:
    """Integers and scales of a few experts; gate rows before up rows."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @classmethod
    def random(cls, shape: Shape, scheme: Scheme, seed: int) -> _LayerWeights:
        experts = min(shape.experts, _DISTINCT)
        gate_up = random_values(experts, 2 * shape.intermediate, shape.hidden, scheme, 2 * seed)
        down = random_values(experts, shape.hidden, shape.intermediate, scheme, 2 * seed + 1)
        return cls(*gate_up, *down)

    def bf16(self) -> tuple[Tensor, Tensor]:
        """gate_up and down."""
        gate_up = reference.dequantize(self.gate_up, self.gate_up_scale)
        return gate_up.to(torch.bfloat16), reference.dequantize(self.down, self.down_scale).to(torch.bfloat16)


def _repeated(few: Tensor, shape: Shape) -> Tensor:
    """All experts of a layer from a few, each with memory of its own."""
    return few[torch.arange(shape.experts) % few.shape[0]]


def _alternating(rows: Tensor) -> Tensor:
    """[experts, gate rows before up rows, ...] -> gate and up rows alternating."""
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)


def _weights_per_expert(shape: Shape) -> int:
    return 3 * shape.hidden * shape.intermediate


def _scheme_obstacle(shape: Shape) -> str | None:
    try:
        fitting_scheme(_GROUPED, shape)
    except UnsupportedScheme as error:
        return str(error)
    return None


def _available_bytes() -> float:
    """Memory that can be had without swapping, less a tenth for everything else."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 0.9 * 1024 * int(rest.split()[0])
    raise OSError("/proc/meminfo has no MemAvailable")


def _numa_nodes() -> list[int]:
    """NUMA nodes of the CPUs that this process may use."""
    cpus = (Path(f"/sys/devices/system/cpu/cpu{cpu}") for cpu in os.sched_getaffinity(0))
    nodes = {int(link.name.removeprefix("node")) for cpu in cpus for link in cpu.glob("node[0-9]*")}
    return sorted(nodes)[: _core.thread_count()] or [0]


def _sentence(error: BaseException) -> str:
    """The exception's kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Compiled libraries print when they load and unload; stdout belongs to the results."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
