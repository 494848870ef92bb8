"""Threads: counts, callers, fork, affinity."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from random_layers import random_layer, routing

import cpumoe
from cpumoe import _core


def test_follows_torch_and_affinity() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert cpumoe.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert cpumoe.get_num_threads() == min(before, len(os.sched_getaffinity(0)))
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert cpumoe.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, cpus)


def test_set_num_threads() -> None:
    cpumoe.set_num_threads(3)
    assert cpumoe.get_num_threads() == 3
    with pytest.raises(ValueError, match="num_threads=-1; 1 to 4096"):
        cpumoe.set_num_threads(-1)
    cpumoe.set_num_threads(0)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    prelude = "import torch, cpumoe\nfrom cpumoe import _core\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.full
def test_environment() -> None:
    assert run("print(cpumoe.get_num_threads())", CPUMOE_NUM_THREADS="2").stdout.strip() == "2"
    for bad in ("0", "-3", "many", "2x", "", "99999"):
        done = run("cpumoe.get_num_threads()", CPUMOE_NUM_THREADS=bad)
        assert f"CPUMOE_NUM_THREADS={bad}; a whole number from 1 to 4096 is accepted" in done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.parametrize("binding", ["GOMP_CPU_AFFINITY", "OMP_PROC_BIND"])
def test_threads_that_are_bound(binding: str) -> None:
    """Where OpenMP binds threads, the caller may run on its own place alone; its team is as large as ever."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    value = f"{first} {second}" if binding == "GOMP_CPU_AFFINITY" else "true"
    code = "import os; print(len(os.sched_getaffinity(0)), cpumoe.get_num_threads())"
    done = run(code, **{binding: value, "OMP_NUM_THREADS": "2"})
    assert done.stdout.split() == ["1", "2"], done.stderr


def test_torch_threads_are_shared() -> None:
    assert _core.thread_source() == "openmp"


def test_calls_from_several_python_threads() -> None:
    experts = random_layer("w4a8-g32", experts=8).experts("native")
    ids, weights = routing(20, 8, 2)
    x = torch.randn(20, 128)
    expected = experts(x, ids, weights)
    wrong = []

    def work() -> None:
        for _ in range(30):
            if not torch.equal(experts(x, ids, weights), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os
torch.set_num_threads(2)
experts = cpumoe.Experts.quantize(torch.randn(4, 64, 64), torch.randn(4, 64, 32), "w4a8-g32")
x = torch.randn(40, 64)
weights, ids = cpumoe.select_experts(torch.randn(40, 4), 2)
expected = experts(x, ids, weights)
children = []
for i in range(3):
    child = os.fork()
    if child == 0:
        ok = torch.equal(experts(x, ids, weights), expected) and _core.thread_source() == "own"
        ok = ok and torch.equal(experts(x, ids, weights), expected)
        os._exit(0 if ok else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0, 0, 0], codes
assert torch.equal(experts(x, ids, weights), expected)
print("ok")
"""


def test_after_fork() -> None:
    done = run(FORK)
    assert done.stdout.strip() == "ok", done.stderr


FORK_BEFORE_THE_FIRST_CALL = """
import os
torch.set_num_threads(2)
(torch.ones(1 << 22) + 1).sum()  # PyTorch's threads exist, ours have not been asked for yet
child = os.fork()
if child == 0:
    # Nothing of PyTorch here: its own parallel loops do not survive a fork.
    ok = _core.dot_rate(10) > 0 and _core.thread_source() == "own"
    os._exit(0 if ok and cpumoe.get_num_threads() == min(2, len(os.sched_getaffinity(0))) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
torch.set_num_threads(1)
child = os.fork()
if child == 0:
    os._exit(0 if cpumoe.get_num_threads() == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("ok")
"""


def test_fork_before_the_first_call() -> None:
    done = run(FORK_BEFORE_THE_FIRST_CALL)
    assert done.stdout.strip() == "ok", done.stderr


FORK_WHILE_BUSY = """
import os, threading
experts = cpumoe.Experts.quantize(torch.randn(8, 512, 256), torch.randn(8, 256, 256), "w4a8-g32")
x = torch.randn(256, 256)
weights, ids = cpumoe.select_experts(torch.randn(256, 8), 2)
expected = experts(x, ids, weights)
stop = False
def work():
    while not stop:
        experts(x, ids, weights)
thread = threading.Thread(target=work)
thread.start()
for i in range(5):
    child = os.fork()
    if child == 0:
        # Compared with NumPy: PyTorch's own parallel loops do not survive a fork.
        os._exit(0 if (experts(x, ids, weights).numpy() == expected.numpy()).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop = True
thread.join()
print("ok")
"""


def test_fork_while_another_thread_computes() -> None:
    done = run(FORK_WHILE_BUSY)
    assert done.stdout.strip() == "ok", done.stderr


def test_without_an_openmp_runtime() -> None:
    """The core alone, without PyTorch: its own pool serves."""
    code = (
        "import importlib.util, sys, numpy\n"
        "spec = importlib.util.spec_from_file_location('_core', sys.argv[1])\n"
        "core = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(core)\n"
        "assert 'torch' not in sys.modules\n"
        "core.set_thread_count(3)\n"
        "spec = core.PackedSpec(weights='int4', group_size=32, scales='float32', experts=1, out_features=64,\n"
        "                       in_features=96, gated=False, has_bias=False, has_zero_points=False,\n"
        "                       activations='int8')\n"
        "blob = numpy.empty(spec.packed_bytes, numpy.uint8)\n"
        "core.write_packed_header(blob, spec)\n"
        "values = numpy.random.default_rng(0).integers(-8, 8, (1, 64, 96)).astype(numpy.int8)\n"
        "scales = numpy.ones((1, 64, 3), numpy.float32)\n"
        "core.pack_into(blob, 0, values, scales, None, None, None, None, None, 0, 'w')\n"
        "x = numpy.random.default_rng(1).normal(size=(5, 96)).astype(numpy.float32)\n"
        "out = numpy.empty((5, 64), numpy.float32)\n"
        "core.linear(x, blob, out)\n"
        "exact = x @ values[0].T.astype(numpy.float32)\n"
        "assert numpy.linalg.norm(out - exact) < 0.02 * numpy.linalg.norm(exact)\n"
        "print(core.thread_source())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, _core.__file__], capture_output=True, text=True)
    assert done.stdout.strip() == "own", done.stderr
