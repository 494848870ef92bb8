"""A layer, and with ``--model`` a whole model, on two ranks of one thread each beside one rank of one thread.

    python benchmarks/ranks.py [--tokens 1,64,512] [--model FOLDER]

starts its own ranks with torchrun. All of them are on this machine and take turns: what one rank does alone is measured
in the same run, while the other one sleeps. Times are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import cpumoe
from cpumoe import Experts, ParallelLayout
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks

_EXPERTS, _HIDDEN, _INNER, _TOPK = 128, 2048, 768, 8  # Qwen3-30B-A3B


def _medians(calls: Sequence[Callable[[], object]], ranks: Ranks, seconds: float) -> list[float]:
    """Median time of each call, on the slowest rank. They take turns: the machine is not the same all the time."""
    started = time.perf_counter()
    for call in calls:
        call()
    once = time.perf_counter() - started
    rounds = ranks.gather_numbers([max(5, min(200, int(seconds / once)))])[0][0]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            ranks.gather_numbers([0])
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    of_ranks = ranks.gather_numbers([int(statistics.median(taken) * 1e9) for taken in times])
    return [max(of_call) / 1e9 for of_call in zip(*of_ranks, strict=True)]


def _alone(call: Callable[[], object], ranks: Ranks, seconds: float) -> float:
    """The same on the first rank, while the others wait."""
    (taken,) = _medians([call], Ranks.alone(), seconds) if ranks.rank == 0 else (0.0,)
    return ranks.gather_numbers([int(taken * 1e9)])[0][0] / 1e9


def _routed(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, _HIDDEN), generator=generator).to(torch.bfloat16)
    ids = torch.rand((tokens, _EXPERTS), generator=generator).topk(_TOPK, 1).indices.to(torch.int32)
    return x, ids, torch.rand((tokens, _TOPK), generator=generator)


def _layers(world: Ranks, counts: list[int], seconds: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randint(-8, 8, (_EXPERTS, 2 * _INNER, _HIDDEN), dtype=torch.int8, generator=generator)
    down = torch.randint(-8, 8, (_EXPERTS, _HIDDEN, _INNER), dtype=torch.int8, generator=generator)
    scales = [
        torch.full((_EXPERTS, w.shape[1], w.shape[2] // 128), 0.01, dtype=torch.bfloat16) for w in (gate_up, down)
    ]
    whole = Experts.from_quantized(gate_up, scales[0], down, scales[1], "w4a8-g128")
    del gate_up, down
    size = world.size
    layouts = {
        "EP, all_reduce": ParallelLayout(tp_size=size, expert_parallel=True),
        "TP, all_reduce": ParallelLayout(tp_size=size),
        "DP+EP, allgather_reducescatter": ParallelLayout(dp_size=size, expert_parallel=True),
        "DP+EP, all_to_all": ParallelLayout(dp_size=size, expert_parallel=True, exchange=Exchange.ALL_TO_ALL),
    }
    if world.rank == 0:
        heads = ("T", "1 rank ms", f"{size} ranks ms", "times", "own part ms", "added")
        print(f"{'layout':32} " + " ".join(f"{head:>11}" for head in heads))
    for name, layout in layouts.items():
        ranks = Ranks.join(layout)
        spread = ParallelExperts(whole.part(ranks.layout.part_of(_EXPERTS, _INNER)), whole.config, ranks)
        own = Experts(spread.config, spread.backend, dict(spread.named_buffers()))
        for count in counts:
            each = count if layout.has_all_tokens else max(1, count // size)
            everything = _routed(count, 3)
            first = 0 if layout.has_all_tokens else each * ranks.rank
            mine = tuple(part[first : first + each] for part in everything)
            copies = spread.for_core(everything[0].dtype).copies  # one of each expert
            local = (everything[0], everything[1] if copies is None else copies.places[everything[1].long()])
            alone = _alone(partial(whole, *everything), world, seconds)
            calls = [partial(spread, *mine), partial(own, *local, everything[2], fp32_out=True)]
            together, part = _medians(calls, world, seconds)
            if world.rank == 0:
                figures = (
                    *(f"{count}", f"{alone * 1e3:.2f}", f"{together * 1e3:.2f}", f"{alone / together:.2f}"),
                    *(f"{part * 1e3:.2f}", f"{together / part - 1:.1%}"),
                )
                print(f"{name:32} " + " ".join(f"{figure:>11}" for figure in figures), flush=True)


def _model(world: Ranks, folder: str, tokens: int) -> None:
    for name, layout in (
        ("EP", ParallelLayout(tp_size=world.size, expert_parallel=True)),
        ("TP", ParallelLayout(tp_size=world.size)),
    ):
        ranks = Ranks.join(layout)
        model = cpumoe.load_model(folder, ranks=ranks, linears="w8a8")
        native = native_with_head(model)
        assert native is not None, "its steps are not one call of the core"
        assert ranks.exchange is not None
        prompt = torch.arange(8).unsqueeze(0)
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=4, do_sample=False)
            native.decoder.take_seconds()
            waited = ranks.exchange.waited_seconds
            started = time.perf_counter()
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            passed = time.perf_counter() - started
        parts = native.decoder.take_seconds()
        layers = len(native.decoder.model.layers)
        if world.rank == 0:
            each = 1e6 / tokens / layers
            exchange, waited = parts["exchange"] * each, (ranks.exchange.waited_seconds - waited) * each
            print(
                f"{name}: {tokens / passed:.1f} tokens/s; exchange {exchange:.1f} us a layer and token, of which "
                f"{waited:.1f} are waiting for the slower rank",
                flush=True,
            )
        del model, native


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1,64,512")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--model", help="a checkpoint whose steps are one call of the core")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
        raise SystemExit(subprocess.run([*command, __file__, *sys.argv[1:]], env=environment, check=False).returncode)
    torch.set_num_threads(1)
    world = Ranks.join()
    with world.together():
        _layers(world, [int(count) for count in arguments.tokens.split(",")], arguments.seconds)
        if arguments.model is not None:
            _model(world, arguments.model, arguments.new_tokens)


if __name__ == "__main__":
    main()
