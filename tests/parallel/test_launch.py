"""One rank for every memory node: real processes on an invented machine of two nodes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sampling import first_of
from tiny_models import write_tiny_model

from cpumoe import cli, numa
from cpumoe.numa import Node, Topology
from cpumoe.parallel import launch
from cpumoe.parallel.launch import launch_on_nodes

CPUS = sorted(os.sched_getaffinity(0))
TWO = Topology((Node(0, tuple(CPUS[:1]), 1 << 30), Node(1, tuple(CPUS[1:2]), 1 << 30)))

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def test_masks_environment_and_input(tmp_path: Path) -> None:
    code = """
        import json, os, sys
        told = {"cpus": sorted(os.sched_getaffinity(0)), "input": sys.stdin.read(), "parent": os.getppid()}
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CPUMOE_RANK_OF_NODE")
        told |= {name: os.environ[name] for name in names}
        maps = "/proc/self/numa_maps"
        told["policy"] = "bind:0" in open(maps).read() if os.path.exists(maps) else None
        open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps(told))
    """
    assert launch_on_nodes(TWO, python(code, str(tmp_path / "rank")), "é\n".encode()) == 0
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}").read_text())
        assert told["cpus"] == [CPUS[rank]] and told["input"] == "é\n" and told["parent"] == os.getpid()
        assert (told["RANK"], told["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (told["OMP_NUM_THREADS"], told["CPUMOE_RANK_OF_NODE"]) == ("1", "1")
        if rank == 0 and told["policy"] is not None:  # the second node is not there
            assert told["policy"]


def test_they_are_ranks_of_one_group() -> None:
    code = """
        import os, torch
        from cpumoe.parallel.ranks import Ranks
        del os.environ["GLOO_SOCKET_IFNAME"]  # as under torchrun
        ranks = Ranks.join()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert ranks.size == 2 and ranks.sum_(torch.tensor([ranks.rank + 1.0])).item() == 3.0
    """
    assert launch_on_nodes(TWO, python(code)) == 0


def test_nothing_listens_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torch.distributed and gloo have no authentication: nothing outside this host may reach them."""
    for interface in Path("/sys/class/net").glob("*"):  # as it may be set for ranks on several hosts
        if (interface / "operstate").read_text().strip() == "up":
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface.name)
    code = """
        import os
        from pathlib import Path
        import cpumoe
        from cpumoe.parallel.ranks import Ranks

        def listening(pid):
            own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
            rows = [row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/{pid}/net/{kind}")]
            return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]

        os.environ["CPUMOE_SHARED_MEMORY"] = "0"
        ranks = Ranks.join(cpumoe.ParallelLayout(dp_size=2, expert_parallel=True))
        ranks.gather_numbers([1])
        for pid in (os.getppid(), os.getpid()):
            found = listening(pid)
            assert found and set(found) <= {"0100007F", "0" * 24 + "01000000"}, (pid, os.getpid(), found)
        ranks.gather_numbers([1])
    """
    assert launch_on_nodes(TWO, python(code)) == 0


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((3, 0), 3), ((0, 4), 4), ((5, 6), 5)])
def test_exit_codes(codes: tuple[int, int], expected: int) -> None:
    code = "import os, sys; sys.exit(int(sys.argv[1 + int(os.environ['RANK'])]))"
    assert launch_on_nodes(TWO, python(code, *map(str, codes))) == expected


def test_nobody_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails, and the other waits for ever and does not heed SIGTERM."""
    monkeypatch.setattr(launch, "_GRACE_SECONDS_OF_FAILURE", 0.2)
    monkeypatch.setattr(launch, "_SECONDS_TO_KILL", 0.5)
    code = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(1000)
    """
    started = time.monotonic()
    assert launch_on_nodes(TWO, python(code)) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 30


LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_launch import TWO, python
from cpumoe.parallel.launch import launch_on_nodes
print("go", flush=True)
code = "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(1000)"
sys.exit(launch_on_nodes(TWO, python(code, sys.argv[2])))
"""


@pytest.mark.parametrize("number", first_of([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], 1))
def test_signals_end_all(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(Path(__file__).parent), str(tmp_path / "rank")]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        files = [tmp_path / "rank0", tmp_path / "rank1"]
        _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        running.send_signal(number)
        assert running.wait(60) != 0
    pids = [int(file.read_text()) for file in files]
    _wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and _runs(pid) for pid in pids))


JOINING = """
import os, sys, time
from cpumoe.parallel import joining
from cpumoe.parallel.ranks import Ranks

def hold(*_, **__):
    open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
    time.sleep(1000)

if sys.argv[2] == "memory is made":
    joining.dist.broadcast_object_list = hold
else:  # all have opened and locked it
    stock = joining.SharedExchange
    def opened(*arguments):
        kept = stock(*arguments)
        hold()
    joining.SharedExchange = opened
    opened.file_bytes = stock.file_bytes
Ranks.join()
"""


@pytest.mark.parametrize(
    ("stage", "number", "to_ranks"),
    first_of(
        [("memory is opened", signal.SIGKILL, True), ("memory is made", signal.SIGKILL, False)],
        2,
        itertools.product(("memory is made", "memory is opened"), (signal.SIGTERM, signal.SIGKILL), (True, False)),
    ),
)
def test_killed_while_joining(tmp_path: Path, stage: str, number: signal.Signals, to_ranks: bool) -> None:
    """Neither files, nor locks, nor processes are left."""
    code = textwrap.dedent(LAUNCHER).replace("python(code, sys.argv[2])", "python(*sys.argv[2:])")
    command = [sys.executable, "-c", code, str(Path(__file__).parent), JOINING, str(tmp_path / "rank"), stage]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        files = [tmp_path / "rank0", tmp_path / "rank1"]
        _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
        memory = {str(link.readlink()): link.stat().st_ino for link in links if "cpumoe-ranks" in str(link.readlink())}
        assert len(memory) == 1 and all(name.startswith("/memfd:") for name in memory)
        assert not any("/dev/shm" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        locked = f":{next(iter(memory.values()))} "
        assert (locked in Path("/proc/locks").read_text()) == (stage == "memory is opened")
        for pid in pids if to_ranks else [running.pid]:
            os.kill(pid, number)
        assert running.wait(60) != 0
    _wait_until(lambda: not any(_runs(pid) for pid in pids))
    assert locked not in Path("/proc/locks").read_text()
    assert not any(Path("/dev/shm").glob("cpumoe-*"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- the option ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.full
def test_generate(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "The experts", "--scheme", "w4a8-g32", "--max-new-tokens", "12", "--greedy"]
    assert cli.main(arguments) == 0
    alone = capfd.readouterr().out
    monkeypatch.setattr(numa, "read_topology", lambda: Topology((Node(0, tuple(CPUS), 1 << 30),)))
    assert cli.main([*arguments, "--ranks", "numa"]) == 0
    one = capfd.readouterr()
    assert one.out == alone and "one memory node: --ranks numa changes nothing" in one.err
    monkeypatch.setattr(numa, "read_topology", lambda: TWO)
    assert cli.main([*arguments, "--ranks", "numa"]) == 0
    two = capfd.readouterr()
    assert two.out == alone and two.err.count("tokens/s, decode") == 1


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", str(folder), "x"], ["serve", str(folder)]):
        assert cli.main([*command, "--ranks", "numa", "--tp", "2"]) == 2
        assert "--ranks numa with a layout" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["generate", str(folder), "x", "--ranks", "numa"]) == 2
    assert "--ranks numa starts the ranks itself" in capfd.readouterr().err
