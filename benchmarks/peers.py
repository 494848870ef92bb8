"""Measures other systems with the same routing and threads and adds their rows to those of ``cpumoe bench``.

    python benchmarks/peers.py --tokens 1,8,64   # takes the options of ``cpumoe bench``

Systems that are not installed are reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from peer import (
    GROUPED,
    PER_CHANNEL,
    LayerWeights,
    Peer,
    PreparedPeer,
    repeated,
    scheme_obstacle,
    sentence,
    weights_per_expert,
)
from peer_kt_kernel import KtKernelPeer
from peer_onnxruntime import OnnxRuntimePeer
from torch import Tensor
from torch.nn import functional as F

from cpumoe import _core
from cpumoe.bench.measure import (
    Call,
    Limits,
    Row,
    make_inputs,
    make_row,
    mean_active_experts,
    memory_to_probe,
    time_calls,
)
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import fitting_scheme
from cpumoe.cli import bench, bench_layers
from cpumoe.cli.arguments import add_threads, use_threads
from cpumoe.layers import reference
from cpumoe.layers.activation import Activation
from cpumoe.layers.experts import Experts

Note = Callable[[str], None]  # gets a sentence for the user

_PATIENCE = 60.0  # seconds that a row may take even if the budget is smaller
_FEWEST_CALLS = 7  # time_calls makes at least this many
_SETTLE = 0.1  # seconds until the waiting threads of a system have stopped spinning (kt-kernel: 50 ms)


class TorchBf16Peer(Peer):
    """What models do without any of these systems: a loop over the active experts, with weights in bf16."""

    name = "torch-bf16"

    def bytes_per_expert(self, shape: Shape) -> float:
        return 2.0 * weights_per_expert(shape)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        calls = [self._call(shape, seed) for seed in range(self.copies(shape))]
        return self.prepared(shape, "bf16", calls, self.bytes_per_expert(shape))

    def _call(self, shape: Shape, seed: int) -> Call:
        gate_up, down = (repeated(few, shape) for few in LayerWeights.random(shape, PER_CHANNEL, seed).bf16())
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
    building = 1.5  # for the packed experts before they are stacked, and the integers that they are made from

    def own_obstacle(self, shape: Shape) -> str | None:
        if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
            return f"PyTorch {torch.__version__} has no _dyn_quant_matmul_4bit"
        return scheme_obstacle(shape)

    def bytes_per_expert(self, shape: Shape) -> float:
        # Without KleidiAI PyTorch stores every pair of weights, and every scale, as a float.
        group = fitting_scheme(GROUPED, shape).group_size or shape.hidden
        return 4.0 * weights_per_expert(shape) * (1 / 2 + 1 / group)

    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        scheme = fitting_scheme(GROUPED, shape)
        layers = []
        for seed in range(self.copies(shape)):
            few = LayerWeights.random(shape, scheme, seed)
            parts = (few.gate_up.values, few.gate_up.scales, few.down.values, few.down.scales)
            w1, s1, w2, s2 = (repeated(part, shape) for part in parts)
            activation = shape.activation
            layer = Experts.from_quantized(w1, s1, w2, s2, scheme, activation=activation, backend="aten")
            layers.append(layer)
        calls: list[Call] = [layer.__call__ for layer in layers]
        return self.prepared(shape, str(scheme), calls, layers[0].packed_bytes / shape.num_experts)


PEERS: tuple[Peer, ...] = (TorchBf16Peer(), AtenPeer(), OnnxRuntimePeer(), KtKernelPeer())


def bench_peers(shape: Shape, tokens: list[int], dtype: torch.dtype, budget: float, note: Note) -> Iterator[Row]:
    """Rows of the other systems for one shape. ``note`` gets a sentence about each system that is left out or fails."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(_core.thread_count())
    try:
        for peer in PEERS:
            try:
                with _stdout_to_stderr():
                    reason = peer.obstacle(shape)
                if reason is None:
                    yield from _bench_peer(peer, shape, tokens, dtype, budget, note)
                else:
                    note(f"{peer.name}: {reason}")
            except Exception as error:  # the failure of one system must not cost the rows of the next
                note(f"{peer.name}: {sentence(error)}")
    finally:
        torch.set_num_threads(torch_threads)


def _bench_peer(
    peer: Peer, shape: Shape, tokens: list[int], dtype: torch.dtype, budget: float, note: Note
) -> Iterator[Row]:
    memory = memory_to_probe()
    with _stdout_to_stderr():
        prepared = peer.prepare(shape, dtype)
    if (remark := peer.remark()) is not None:
        note(f"{peer.name}: {remark}")
    seconds_per_token, longest = 0.0, max(_PATIENCE, budget) / _FEWEST_CALLS
    try:
        for count in sorted(tokens):
            inputs = make_inputs(shape, count, dtype)
            limits = Limits()
            if seconds_per_token * count > longest:  # an estimate, which one call confirms or not
                start = time.perf_counter()
                prepared.calls[0](*inputs[0])
                if (once := time.perf_counter() - start) > longest:
                    note(f"{peer.name}: {count} tokens and more left out; one call takes {once:.0f} s")
                    return

            def between(_: int, limits: Limits = limits) -> None:
                time.sleep(_SETTLE)
                limits.probe(memory)

            seconds = time_calls(prepared.calls, inputs, budget, between)
            seconds_per_token = statistics.median(seconds) / count
            weight_bytes = mean_active_experts(inputs) * prepared.bytes_per_expert
            yield make_row(
                peer.name,
                shape,
                prepared.scheme,
                count,
                seconds,
                weight_bytes,
                limits,
                "-",
                from_memory=prepared.from_memory,
            )
    finally:
        with _stdout_to_stderr():
            del prepared


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends stdout to stderr inside the block: compiled libraries print there, but stdout is for the results."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures as cpumoe bench does, and then other systems.")
    bench.add_options(parser)
    add_threads(parser)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        use_threads(arguments.threads)
    try:
        return bench_layers.run(arguments, bench_peers)
    except (ValueError, RuntimeError, OSError) as problem:
        print(f"{sys.argv[0]}: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
