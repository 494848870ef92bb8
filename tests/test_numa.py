"""Memory nodes: what is read from the kernel, and what threads and weights do on invented machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from random_layers import SCHEMES, fitting, linear_inputs, random_layer, routing
from torch import Tensor

import cpumoe
from cpumoe import _core, cli, numa
from cpumoe.layers.rounding import quantize_weight
from cpumoe.numa import Node, Place, Topology, plan_threads, read_topology

GB = 1 << 30


def write_nodes(
    root: Path,
    cpus: dict[int, str],
    *,
    memory: dict[int, int] | None = None,
    online: str | None = None,
    distances: dict[int, str] | None = None,
) -> Path:
    """A sysfs with nodes: number -> list of CPUs; every node has 4 GB unless ``memory`` says otherwise."""
    folder = root / "devices/system/node"
    folder.mkdir(parents=True)
    sizes = {number: (memory or {}).get(number, 4 * GB) for number in cpus}
    (folder / "online").write_text((online or ",".join(map(str, cpus))) + "\n")
    (folder / "has_memory").write_text(",".join(str(n) for n, size in sizes.items() if size) + "\n")
    for number, text in cpus.items():
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(text + "\n")
        (node / "meminfo").write_text(
            f"Node {number} MemTotal:       {sizes[number] // 1024} kB\nNode {number} X: 1 kB\n"
        )
        usual = " ".join("10" if other == number else "21" for other in cpus)
        (node / "distance").write_text((distances or {}).get(number, usual) + "\n")
    return root


def read(root: Path, cpus: Iterable[int], memory_nodes: Iterable[int] = range(64)) -> Topology:
    return read_topology(root, cpus, memory_nodes)


def equal_nodes(count: int, cpus_each: int) -> dict[int, str]:
    return {n: f"{n * cpus_each}-{(n + 1) * cpus_each - 1}" for n in range(count)}


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_equal_nodes(tmp_path: Path, count: int) -> None:
    topology = read(write_nodes(tmp_path, equal_nodes(count, 4)), range(4 * count))
    assert [node.number for node in topology.nodes] == list(range(count)) and not topology.remarks
    assert all(node.memory_bytes == 4 * GB and len(node.cpus) == 4 for node in topology.nodes)
    assert topology.places == tuple(Place(tuple(range(4 * n, 4 * n + 4)), n) for n in range(count))
    assert plan_threads(topology, 4 * count) == tuple(cpu // 4 for cpu in range(4 * count))


def test_this_machine() -> None:
    topology = read_topology()
    assert {cpu for node in topology.nodes for cpu in node.cpus} == os.sched_getaffinity(0)
    assert sum(node.memory_bytes for node in topology.nodes) > 0 and not topology.remarks


def test_without_nodes(tmp_path: Path) -> None:
    topology = read(tmp_path, [3, 1])
    (node,) = topology.nodes
    assert (node.number, node.cpus) == (0, (1, 3)) and node.memory_bytes > 0 and not topology.remarks


def test_hyperthreads_come_in_several_ranges(tmp_path: Path) -> None:
    topology = read(write_nodes(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}), range(8))
    assert [place.cpus for place in topology.places] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_mask_cuts_through_nodes(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, equal_nodes(4, 4))
    topology = read(root, [0, 5, 6, 7, 8])  # one of node 0, three of node 1, one of node 2, none of node 3
    assert [len(node.cpus) for node in topology.nodes] == [1, 3, 1, 0]
    assert topology.places == (Place((0,), 0), Place((5, 6, 7), 1), Place((8,), 2))
    assert plan_threads(topology, 5) == (0, 1, 1, 1, 2)
    assert len(read(root, [4, 5]).places) == 1


def test_offline_nodes_are_not_there(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, equal_nodes(4, 2), online="0,2-3", distances=dict.fromkeys(range(4), "10 21 21"))
    assert [node.number for node in read(root, [0, 1, 4, 5, 6, 7]).nodes] == [0, 2, 3]


def test_nodes_without_memory_read_from_the_nearest(tmp_path: Path) -> None:
    distances = {0: "10 12 30 32", 1: "12 10 31 30", 2: "30 31 10 12", 3: "32 30 12 10"}
    root = write_nodes(tmp_path, equal_nodes(4, 2), memory={1: 0, 3: 0}, distances=distances)
    topology = read(root, range(8))
    assert topology.places == (Place((0, 1, 2, 3), 0), Place((4, 5, 6, 7), 2))
    far = write_nodes(tmp_path / "far", equal_nodes(3, 2), memory={1: 0}, distances={1: "40 10 20"})
    assert read(far, range(6)).places == (Place((0, 1), 0), Place((2, 3, 4, 5), 2))


def test_nodes_without_cpus_have_no_weights(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, {0: "0-1", 1: "", 2: "2-3"}, memory={1: 64 * GB})
    topology = read(root, range(4))
    assert [place.memory_node for place in topology.places] == [0, 2]
    only = write_nodes(tmp_path / "only", {0: "0-1", 1: ""}, memory={0: 0})
    assert read(only, range(2)).places == (Place((0, 1), 1),)  # there is no other memory


def test_memory_that_a_cpuset_forbids_counts_as_none(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, equal_nodes(2, 2))
    assert read(root, range(4), memory_nodes=[1]).places == (Place((0, 1, 2, 3), 1),)


NONSENSE = [
    ("online", "zero", "'zero' is not a list of numbers", 1),
    ("online", "3-1", "has the range 3 to 1", 1),
    ("online", "0-999999", "has the range 0 to 999999", 1),
    ("has_memory", "\x00\x1b[31m", "has_memory", 2),
    ("node1/cpulist", "2-3x", "node 1 is ignored: '2-3x' is not a list of numbers", 1),
    ("node1/cpulist", "0-9" * 2000, "node 1 is ignored", 1),
    ("node1/cpulist", "1-3", "node 1 is ignored: CPU 1 belongs to another one too", 1),
    ("node1/meminfo", "", "node 1 is ignored: its meminfo has no MemTotal", 1),
    ("node1/meminfo", "MemTotal: -5 kB", "node 1 is ignored", 1),
    ("node1/distance", "10 twenty", "is not a distance for each of 2 nodes", 2),
    ("node1/distance", "10", "is not a distance for each of 2 nodes", 2),
]


@pytest.mark.parametrize(("file", "content", "remark", "nodes"), NONSENSE)
def test_nonsense_is_ignored_with_a_reason(tmp_path: Path, file: str, content: str, remark: str, nodes: int) -> None:
    root = write_nodes(tmp_path, equal_nodes(2, 2))
    (root / "devices/system/node" / file).write_text(content)
    topology = read(root, range(4))
    assert remark in " | ".join(topology.remarks)
    assert len(topology.nodes) == nodes
    assert {cpu for node in topology.nodes for cpu in node.cpus} == set(range(4))  # nobody is lost


def test_what_cannot_be_read(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, equal_nodes(2, 2))
    folder = root / "devices/system/node"
    (folder / "node1/cpulist").write_bytes(b"\xff\xfe")
    assert "node 1 is ignored" in read(root, range(4)).remarks[0]
    (folder / "node0/meminfo").unlink()
    (folder / "node0/meminfo").mkdir()
    assert "node 0 is ignored: Is a directory" in read(root, range(4)).remarks[0]
    (folder / "online").unlink()
    (folder / "online").mkdir()
    assert len(read(root, range(4)).nodes) == 1


def test_lists() -> None:
    assert numa.parse_list("0-2,7,9-10\n") == (0, 1, 2, 7, 9, 10) and numa.parse_list("\n") == ()
    assert numa.list_text((0, 1, 2, 7, 9, 10)) == "0-2,7,9-10" and numa.list_text(()) == ""


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpus", [(1,), (4, 4), (1, 3), (5, 2, 9), (1, 1, 1, 1), (6,) * 8, (1, 127)])
def test_threads_are_shared_out_by_cpus(cpus: tuple[int, ...]) -> None:
    for threads in (*range(1, 40), sum(cpus), 3 * sum(cpus)):
        plan = _core.node_shares(list(cpus), threads)
        assert len(plan) == threads and all(a <= b for a, b in pairwise(plan))
        for node, own in enumerate(cpus):
            assert abs(plan.count(node) - threads * own / sum(cpus)) <= 1
    assert _core.node_shares(list(cpus), sum(cpus)) == [node for node, own in enumerate(cpus) for _ in range(own)]


# ---- what is said, and switches --------------------------------------------------------------------------------------

TWO = Topology((Node(0, (0,), 4 * GB), Node(1, (1,), 4 * GB)))


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPUMOE_NUMA", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.obstacle(Topology((Node(0, (0, 1), GB),))) == "one memory node; nothing to place"
    assert numa.obstacle(TWO) is None
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert numa.obstacle(TWO) == "nothing is placed, because OMP_PLACES places threads already"
    monkeypatch.setenv("CPUMOE_NUMA", "0")
    assert numa.obstacle(TWO) == "nothing is placed, because CPUMOE_NUMA=0"
    monkeypatch.setenv("CPUMOE_NUMA", "off")
    with pytest.raises(ValueError, match="CPUMOE_NUMA='off'; 0 .* and 1 are accepted"):
        numa.obstacle(TWO)
    monkeypatch.delenv("CPUMOE_NUMA")
    monkeypatch.delenv("OMP_PLACES")
    many = Topology((Node(0, (0,), GB), Node(1, (1024,), GB)))
    assert numa.obstacle(many) == "nothing is placed, because there is a CPU 1024"
    numa.use(many)  # and no error


def test_a_bad_switch_is_refused_at_import() -> None:
    environment = {**os.environ, "CPUMOE_NUMA": "2"}
    done = subprocess.run([sys.executable, "-c", "import cpumoe"], env=environment, capture_output=True, text=True)
    assert "CPUMOE_NUMA='2'; 0 (threads and weights are not placed) and 1 are accepted" in done.stderr


def test_doctor_on_one_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(numa, "read_topology", lambda: Topology((Node(0, (0, 1), 4 * GB),)))
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "one memory node; nothing to place" in shown and "node 0" not in shown


@pytest.mark.full
def test_doctor_on_several_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = (
        Node(0, (0, 1, 2), 4 * GB),
        Node(1, (3,), 4 * GB),
        Node(2, (), 64 * GB),
        Node(3, (4, 5), 0, {0: 20, 1: 12}),
    )
    monkeypatch.setattr(numa, "read_topology", lambda: Topology(nodes, ("node 7 is ignored: \x1b[2J",)))
    cpumoe.set_num_threads(6)
    assert cli.main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 threads and the column blocks of packed weights are shared out over 2 nodes" in shown
    assert "node 0 CPUs 0-2, 4.3 GB, threads 0-2, 50% of packed weights" in shown
    assert "node 1 CPUs 3, 4.3 GB, threads 3-5, 50% of packed weights" in shown
    assert "node 2 no CPUs, 68.7 GB" in shown and "node 3 CPUs 4-5, no memory, reads from node 1" in shown
    assert "not understood node 7 is ignored: \\x1b[2J" in shown
    monkeypatch.setenv("CPUMOE_NUMA", "0")
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["numa_nodes"] == 4 and told["numa"]["placement"] == "nothing is placed, because CPUMOE_NUMA=0"
    assert "threads" not in told["numa"]["nodes"]["0"]


# ---- computing and packing -------------------------------------------------------------------------------------------

#: CPUs and memory node of each node. Those that are not here bind nothing and take no pages, but share out the work.
LAYOUTS: dict[str, list[tuple[list[int], int]]] = {
    "two": [([0], 0), ([1], 1)],
    "unequal": [([0], 0), ([1, 2, 3, 4, 5], 1), ([6, 7], 2)],
    "four": [([n], n) for n in range(4)],
    "eight": [([2 * n, 2 * n + 1], n) for n in range(8)],
}


@pytest.fixture
def several_nodes() -> Iterator[None]:
    """Whatever nodes a test uses, it leaves none behind."""
    yield
    _core.set_nodes([])


def on_each_layout(compute: Callable[[], Tensor], threads: Iterable[int]) -> None:
    """The same bits with several nodes as with one, for any number of threads."""
    _core.set_nodes([])
    cpumoe.set_num_threads(1)
    expected = compute()
    for name, layout in LAYOUTS.items():
        _core.set_nodes(layout)
        for count in threads:
            cpumoe.set_num_threads(count)
            assert torch.equal(compute(), expected), f"{name}, {count} threads"


@pytest.mark.every(4)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_same_bits(scheme: str, several_nodes: None) -> None:
    _core.set_nodes(LAYOUTS["two"])  # packed with nodes, too
    experts = random_layer(scheme, hidden=384, inner=fitting(scheme, 192), bias=True).experts("native")
    ids, weights = routing(9, 4, 2)
    x = torch.randn(9, 384, dtype=torch.bfloat16)
    on_each_layout(lambda: experts(x, ids, weights), [3])


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_any_number_of_threads_has_the_same_bits(tokens: int, several_nodes: None) -> None:
    experts = random_layer("w4a8-g32", experts=5, hidden=416, inner=352).experts("native")
    ids, weights = routing(tokens, 5, 3)
    x = torch.randn(tokens, 416)
    on_each_layout(lambda: experts(x, ids, weights), range(1, 6))


def test_whole_experts_have_the_same_bits(several_nodes: None) -> None:
    """With one node a thread takes a whole expert here, with several it does not."""
    experts = random_layer("w4a8-g32", experts=130, hidden=64, inner=96).experts("native")
    ids, weights = routing(200, 130, 4)
    x = torch.randn(200, 64)
    on_each_layout(lambda: experts(x, ids, weights), [1, 2, 4])


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w8a8", "bf16", "fp8-block"])
@pytest.mark.parametrize("rows", [1, 37])
def test_linears_have_the_same_bits(scheme: str, rows: int, several_nodes: None) -> None:
    weight = quantize_weight(torch.randn(1, 1056, 384) / 20, cpumoe.Scheme.parse(scheme))
    scales = None if cpumoe.Scheme.parse(scheme).weights.scale == "none" else weight.scales[0]
    linear = cpumoe.QuantizedLinear.from_quantized(weight.values[0], scales, scheme, **linear_inputs(scheme))
    x = torch.randn(rows, 384)
    on_each_layout(lambda: linear(x), range(1, 6))


def masks_of_threads() -> list[str]:
    lines = [line for path in Path("/proc/self/task").glob("*/status") for line in path.read_text().splitlines()]
    return [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]


THREADS = """
import os, torch, cpumoe
from cpumoe import _core
from test_numa import masks_of_threads
torch.set_num_threads(2)
experts = cpumoe.Experts.quantize(torch.randn(4, 512, 256), torch.randn(4, 256, 256), "w4a8-g32")
x = torch.randn(40, 256)
weights, ids = cpumoe.select_experts(torch.randn(40, 4), 2)
first, second = sorted(os.sched_getaffinity(0))[:2]
before = str(sorted(masks_of_threads()))
_core.set_nodes([([first], 0), ([second], 1)])
experts(x, ids, weights)
masks = masks_of_threads()
assert masks.count(str(second)) == 1 and str(first) not in masks, masks  # the caller's own thread is not bound
assert len(os.sched_getaffinity(0)) >= 2 and cpumoe.get_num_threads() == 2
_core.set_nodes([([first], 0), ([5000 % 1024], 1)])  # a CPU that is not here binds nobody
experts(x, ids, weights)
assert str(second) not in masks_of_threads()
_core.set_nodes([([first], 0), ([second], 1)])
experts(x, ids, weights)
assert str(second) in masks_of_threads()
_core.set_nodes([])
experts(x, ids, weights)
assert str(sorted(masks_of_threads())) >= before and str(second) not in masks_of_threads()
child = os.fork()
if child == 0:
    _core.set_nodes([([first], 0), ([second], 1)])
    experts(x, ids, weights)
    os._exit(0 if str(second) in masks_of_threads() and len(os.sched_getaffinity(0)) >= 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("ok")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_are_bound_and_the_caller_is_not() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


def packed_spec(out_features: int, experts: int) -> _core.PackedSpec:
    return _core.PackedSpec(
        weights="int4",
        group_size=32,
        scales="float32",
        experts=experts,
        out_features=out_features,
        in_features=1024,
        gated=False,
        has_bias=False,
        has_zero_points=False,
        activations="int8",
    )


@pytest.mark.parametrize(("out_features", "unit"), [(608, 4096), (16384, 2 << 20)])
def test_every_page_is_placed_and_none_is_changed(out_features: int, unit: int, several_nodes: None) -> None:
    spec = packed_spec(out_features, experts=3)
    blob = torch.randint(0, 256, (spec.packed_bytes,), dtype=torch.uint8)
    _core.write_packed_header(blob, spec)
    before = blob.clone()
    assert _core.place_packed(blob) == (0, 0, 0)  # one node
    first = -(-blob.data_ptr() // unit)
    pages = (blob.data_ptr() + blob.numel()) // unit - first
    _core.set_nodes([([0], 0), ([1], 0)])  # node 0 is everywhere
    placed, elsewhere, problem = _core.place_packed(blob)
    assert placed == pages and (problem != 0 or elsewhere == 0)  # a sandbox may refuse to move pages
    _core.set_nodes(LAYOUTS["eight"])
    placed, _, _ = _core.place_packed(blob)
    assert placed >= pages and torch.equal(blob, before)
    with pytest.raises(ValueError, match="not weights packed by cpumoe"):
        _core.place_packed(torch.zeros(4096, dtype=torch.uint8))


def test_what_cannot_be_placed_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, several_nodes: None
) -> None:
    monkeypatch.setattr(numa, "_said_before", set())
    caplog.set_level("INFO", logger="cpumoe")
    _core.set_nodes([([0], 0), ([1], 63)])  # no such node
    for _ in range(3):
        random_layer("w4a8-g32", hidden=512, inner=512).experts("native")
    said = [record.message for record in caplog.records if "nodes of their threads" in record.message]
    assert len(said) == 1
