"""What ranks do in the tests of faults; see test_rank_faults.py. One of them goes wrong at a stage, or is ended there.

A stage is announced by a line ``at STAGE`` on stdout; who has to be ended there waits for it.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from random_layers import random_layer

import cpumoe
from cpumoe import ParallelLayout, cpu
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.joining import Meeting
from cpumoe.parallel.linear import SplitLinear
from cpumoe.parallel.ranks import Ranks
from cpumoe.parallel.roll_call import RollCall

_RANK = int(os.environ.get("RANK", "0"))
_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def _stage(name: str, doomed: int, stage: str) -> None:
    """The doomed rank does not get beyond its stage."""
    print(f"at {name}", flush=True)
    if doomed == _RANK and name == stage:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(stage: str, doomed: int, folder: str, groups: int = 1) -> None:
    """Everything that a rank does with a model; the doomed one is killed at a stage of it.

    ``groups``: of ranks that have tokens of their own.
    """
    import torch.distributed as dist

    _stage("start", doomed, stage)
    if stage == "agreement":
        _before(Meeting, "agree_on_layout", "agreement", doomed)
    if stage == "shared memory":
        _before(Meeting, "shared_exchange", "shared memory", doomed)
    layout = ParallelLayout(tp_size=_SIZE // groups, dp_size=groups, expert_parallel=True)
    ranks = Ranks.join(layout, timeout=10)
    _stage("joined", doomed, stage)
    if stage == "packing":
        from cpumoe.integrations.transformers.loading import module_sources

        _before(module_sources, "load_experts", "packing", doomed)
    model = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32, ranks=ranks).eval()
    _stage("loaded", doomed, stage)
    with torch.no_grad():
        if stage in ("prompt", "decoding"):
            _soon("prompt", doomed if stage == "prompt" else None)
            for _ in range(2000 if stage == "prompt" else 1):
                out = model(input_ids=torch.randint(4, 100, (1, 64)), use_cache=True)
            _soon("decoding", doomed if stage == "decoding" else None)
            for _ in range(20000):
                out = model(input_ids=torch.tensor([[7]]), past_key_values=out.past_key_values, use_cache=True)
        else:
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert dist.is_initialized()


def _before(module: Any, name: str, stage: str, doomed: int) -> None:
    """Ends the doomed rank when it comes to a function."""
    stock = getattr(module, name)

    def ended(*arguments: Any, **options: Any) -> Any:
        _stage(stage, doomed, stage)
        return stock(*arguments, **options)

    setattr(module, name, ended)


def _soon(name: str, doomed: int | None) -> None:
    """Ends the doomed rank in the middle of what follows, by a timer."""
    print(f"at {name}", flush=True)
    if doomed == _RANK:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
        signal.setitimer(signal.ITIMER_REAL, 0.3)


def in_layers(doomed: int, way: str, timeout: float) -> None:
    """Layer calls without end, in which the doomed rank goes wrong in some way."""
    layout = ParallelLayout(dp_size=_SIZE, expert_parallel=True)
    if way == "sums":
        layout = ParallelLayout(tp_size=_SIZE)
    ranks = Ranks.join(layout, timeout=timeout)
    whole = random_layer("w4a8-g32", experts=8, inner=384).experts("native")
    own = whole.part(ranks.layout.part_of(8, 384))
    layer = ParallelExperts(own, whole.config, ranks)
    x, ids, weights = torch.randn(16, 128), torch.arange(16).view(-1, 1) % 8, torch.ones(16, 1)
    for call in range(1_000_000):
        if call == 5:
            print("at calls", flush=True)
        if call == 20 and doomed == _RANK:
            _go_wrong(way, ranks)
        layer(x, ids, weights)


def in_long_work(doomed: int, way: str) -> None:
    """Work of which the doomed rank has more than the timeout of messages, or that it does not come to the end of."""
    ranks = Ranks.join(ParallelLayout(tp_size=_SIZE), timeout=2)
    for seconds in (0, 5):  # the second time is not taken for the first
        with ranks.long_work():
            if doomed == _RANK and seconds:
                if way != "long":
                    _go_wrong(way, ranks)
                time.sleep(seconds)
    ranks.gather_numbers([_RANK])


def _go_wrong(way: str, ranks: Ranks) -> None:
    if way in ("kill", "sums"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "exit":
        sys.exit(0)
    if way == "sleep":
        time.sleep(1000)
    if way == "raise":
        raise KeyError("a mistake of one rank")
    if way == "raise inside":
        with ranks.together():
            raise KeyError("a mistake of one rank — naïve" * 100)
    if way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    if way == "garbage":
        _write_garbage()


def _write_garbage() -> None:
    """Over everything that the ranks have mapped together."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith("/memfd:cpumoe-ranks-"):
            with mmap.mmap(int(link.name), 0) as shared:
                shared[:8192] = b"\xa5" * 8192


def in_groups(doomed: int, way: str, where: str, timeout: float) -> None:
    """Messages without end in tensor parallel groups and among all ranks; the doomed one goes wrong before either."""
    ranks = Ranks.join(ParallelLayout(tp_size=2, dp_size=_SIZE // 2, expert_parallel=True), timeout=timeout)
    linear = SplitLinear(torch.nn.Linear(8, 4), ranks.group)
    for call in range(1_000_000):
        wrong = call == 20 and doomed == _RANK
        if wrong and where == "group":
            _go_wrong(way, ranks.group)
        with torch.no_grad():
            linear(torch.randn(3, 8))
        if wrong and where == "all":
            _go_wrong(way, ranks)
        ranks.gather_numbers([call])


def mismatched(odd: int, way: str, folder: str, other: str) -> None:
    """One rank is not like the others."""
    mine = odd == _RANK
    layout = ParallelLayout(tp_size=_SIZE)
    if mine and way == "layout":
        layout = ParallelLayout(tp_size=_SIZE, expert_parallel=True)
    if mine and way == "size":
        layout = ParallelLayout(tp_size=_SIZE * 2)
    if mine and way == "version":
        cpumoe.__version__ = "0.0.1"
    if mine and way == "tiles":
        cpu.has_portable_floats = lambda: False
    if mine and way == "capability":
        torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
    timeout = 7.0 if mine and way == "timeout" else 8.0
    ranks = Ranks.join(layout, timeout=timeout)
    options: dict[str, Any] = {"scheme": "w4a8-g32"}
    if mine and way == "scheme":
        options["scheme"] = "w8a8"
    if mine and way == "linears":
        options["linears"] = "w8a8"
    if mine and way == "kv_cache":
        options["kv_cache"] = "int8"
    if mine and way == "dtype":
        options["dtype"] = torch.bfloat16
    if mine and way == "attention":
        options["attn_implementation"] = "eager"
    if way == "CPUMOE_SCHEME":
        os.environ["CPUMOE_SCHEME"] = options.pop("scheme")
    if mine and way.startswith("CPUMOE_"):
        os.environ |= dict([way.split("=")] if "=" in way else [(way, "w8a8")])
    if mine and way == "no native decoder":
        _break_native_decoder()
    if mine and way == "missing":
        other = f"{other}-that-is-not-there"
    chosen = other if mine and way in ("checkpoint", "missing") else folder
    cpumoe.load_model(chosen, **{"dtype": torch.float32} | options, ranks=ranks)
    print("at loaded", flush=True)


def short_of_memory(folder: str) -> None:
    """The memory of the host has room for the weights of one rank and a half."""
    from cpumoe.integrations.transformers.loading import load_memory, plugin

    def foreseen(*arguments: Any, **options: Any) -> load_memory.WeightBytes:
        weights = load_memory.weight_bytes(*arguments, **options)
        load_memory.available_bytes = lambda: (weights.whole - weights.mapped) * 3 // 2
        return weights

    plugin.weight_bytes = foreseen
    ranks = Ranks.join(ParallelLayout(tp_size=_SIZE), timeout=10)
    cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.bfloat16, ranks=ranks)
    print("at loaded", flush=True)


def _break_native_decoder() -> None:
    """Let what describes a model find something that it does not know."""
    from cpumoe.integrations.transformers import native_decoder
    from cpumoe.integrations.transformers.recognition.values import UnsupportedDecoder

    def refused(*_: Any) -> None:
        raise UnsupportedDecoder("for a test")

    native_decoder.NativeDecoder.__init__ = refused


def never_comes(absent: int) -> None:
    if absent != _RANK:
        Ranks.join(timeout=3)


def called(members: list[int], late: float) -> str:
    """Ranks come to a call, the last of all to none; the first, in which the store is, ends when it knows enough."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if _RANK == _SIZE - 1:
        return ""
    time.sleep(late * _RANK)
    world = range(_SIZE)
    return RollCall(_RANK, members if _RANK in members else world, world).absent()
