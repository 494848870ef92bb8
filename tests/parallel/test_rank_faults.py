"""Ranks that end, hang, raise, differ or write garbage: the others name them, in time, and end with an error."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from rank_processes import Ended, RankProcesses, run_torchrun, shared_files
from sampling import first_of
from tiny_architectures import write_float

_STARTING = 60.0  # seconds that processes may take to come to where they go wrong, on a busy machine
_SLOW = 30.0  # seconds that others may take beyond the timeout, on such a machine
_UNREACHED = 60.0  # a timeout that ranks do not wait for
_AT_ONCE = 0.7 * _UNREACHED  # seconds that ranks may take that do not wait for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("model") / "m", "qwen3_moe", moe_intermediate_size=128)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("other") / "m", "qwen3_moe", moe_intermediate_size=64)


def _names(others: list[Ended], rank: int, *texts: str) -> None:
    """Each has ended with a RankError of which a line names the rank, and says one of the texts."""
    for one in others:
        assert one.code > 0, f"rank {one.rank} ended with {one.code}:\n{one.output}"
        last = [line for line in one.output.splitlines() if "cpumoe.errors.RankError: " in line]
        assert last, f"rank {one.rank}:\n{one.output}"
        assert re.search(rf"ranks? ([0-9, ]*\b)?{rank}\b", last[-1]), f"rank {one.rank}: {last[-1]}"
        assert not texts or any(text in last[-1] for text in texts), f"rank {one.rank}: {last[-1]}"
    assert not shared_files()


def _others(ended: list[Ended], rank: int) -> list[Ended]:
    return [one for one in ended if one.rank != rank]


@pytest.mark.parametrize(
    "stage", first_of(["decoding", "joined", "agreement", "shared memory", "packing", "prompt"], 2)
)
def test_killed_with_a_model(stage: str, folder: Path) -> None:
    with RankProcesses(2, "fault_cases:killed", stage, 1, str(folder)) as ranks:
        ended = ranks.wait(_STARTING + _SLOW)
    assert ended[1].code in (-signal.SIGKILL, -signal.SIGALRM)
    _names(ended[:1], 1)
    assert ended[0].seconds < ended[1].seconds + 10 + _SLOW


@pytest.mark.parametrize(
    ("ranks", "stage", "shared"),
    first_of([(2, "decoding", "1"), (4, "joined", "1"), (4, "decoding", "1"), (4, "decoding", "0")], 1),
)
def test_killed_with_tokens_of_its_own(ranks: int, stage: str, shared: str, folder: Path) -> None:
    """In the steps of two groups: all others name it, and not who waits for it."""
    doomed, environment = ranks - 1, {"CPUMOE_SHARED_MEMORY": shared}
    with RankProcesses(ranks, "fault_cases:killed", stage, doomed, str(folder), 2, environment=environment) as started:
        ended = started.wait(_STARTING + _SLOW)
    assert ended[doomed].code in (-signal.SIGKILL, -signal.SIGALRM)
    _names(_others(ended, doomed), doomed)
    assert max(one.seconds for one in ended) < ended[doomed].seconds + 10 + _SLOW


@pytest.mark.full
def test_killed_through_torch_distributed(folder: Path) -> None:
    environment = {"CPUMOE_SHARED_MEMORY": "0"}
    with RankProcesses(3, "fault_cases:in_layers", 1, "kill", 20.0, environment=environment) as ranks:
        _names(_others(ranks.wait(_STARTING), 1), 1, "does not answer")
    with RankProcesses(2, "fault_cases:killed", "decoding", 0, str(folder), environment=environment) as ranks:
        _names(_others(ranks.wait(_STARTING), 0), 0, "does not answer")


@pytest.mark.full
@pytest.mark.parametrize("shared", first_of(["0", "1"], 1))
def test_long_work(shared: str) -> None:
    """A rank that works for longer than messages may take is not lost; one that has ended or stands still is."""
    environment = {"CPUMOE_SHARED_MEMORY": shared}
    with RankProcesses(3, "fault_cases:in_long_work", 1, "long", environment=environment) as ranks:
        for one in ranks.wait(_STARTING):
            assert one.code == 0, one.output
    for way in ("kill", "stop"):
        with RankProcesses(3, "fault_cases:in_long_work", 1, way, environment=environment) as ranks:
            _names(ranks.wait(_STARTING, without=(1,)), 1, "no sign of life", "has ended")


@pytest.mark.full
@pytest.mark.parametrize("members", first_of([[], [1, 2]], 1))
def test_who_has_called_first_ends_first(members: list[int]) -> None:
    """The store ends with the first rank; the others, of a group of their own or not, name who did not come."""
    with RankProcesses(4, "fault_cases:called", members, 0.7) as ranks:
        ended = ranks.wait(_STARTING)
    assert [one.result for one in ended[:3]] == ["rank 3 does not answer"] * 3, [one.output for one in ended]


@pytest.mark.full
def test_killed_before_it_has_come() -> None:
    """Nobody knows which one it is: that some did not come is all that can be said."""
    with RankProcesses(2, "fault_cases:never_comes", 1) as ranks:
        (one,) = _others(ranks.wait(_STARTING), 1)
    assert one.code > 0
    assert "RankError: the ranks did not come together" in one.output


@pytest.mark.parametrize(
    ("way", "texts"),
    first_of(
        [
            ("kill", ("rank 1 has ended",)),
            ("raise inside", ("rank 1 has failed: KeyError: 'a mistake of one rank",)),
            ("sums", ("rank 1 has ended",)),
            ("exit", ("rank 1 has ended",)),
            ("raise", ("rank 1 has ended",)),
            ("interrupt", ("rank 1 has ended", "rank 1 has failed: KeyboardInterrupt")),
        ],
        2,
    ),
)
def test_ended_in_a_layer(way: str, texts: tuple[str, ...]) -> None:
    with RankProcesses(3, "fault_cases:in_layers", 1, way, _UNREACHED) as ranks:
        ended = ranks.wait(_STARTING + _UNREACHED)
    _names(_others(ended, 1), 1, *texts)
    assert max(one.seconds for one in ended) < ended[1].seconds + _AT_ONCE  # nobody waits for the timeout


@pytest.mark.full
def test_the_ranks_of_a_host_share_its_memory(folder: Path) -> None:
    with RankProcesses(2, "fault_cases:short_of_memory", str(folder)) as ranks:
        ended = ranks.wait(_STARTING)
    for one in ended:
        assert one.code > 0 and "at loaded" not in one.output, one.output
        assert re.search(r"NotEnoughMemory: .* kB for the 2 ranks of this host; .* are free", one.output), one.output


@pytest.mark.parametrize("way", first_of(["stop", "sleep"], 1))
@pytest.mark.parametrize("shared", ["1", "0"])
def test_hangs_in_a_layer(way: str, shared: str) -> None:
    if way == "sleep" and shared == "1":
        pytest.skip("the same as a stopped one, where nothing is asked of it")
    environment = {"CPUMOE_SHARED_MEMORY": shared}
    with RankProcesses(3, "fault_cases:in_layers", 1, way, 3.0, environment=environment) as ranks:
        ended = ranks.wait(_STARTING, without=(1,))
        _names(ended, 1)


@pytest.mark.parametrize("where", first_of(["group", "all"], 1))
@pytest.mark.parametrize(
    ("way", "shared"), first_of([("kill", "1"), ("raise inside", "1"), ("stop", "1"), ("kill", "0")], 1)
)
def test_in_a_group_of_some_ranks(way: str, shared: str, where: str) -> None:
    """Those outside of its group name it too, by its number among all ranks."""
    environment = {"CPUMOE_SHARED_MEMORY": shared}
    timeout = 5.0 if way == "stop" else _UNREACHED
    with RankProcesses(4, "fault_cases:in_groups", 3, way, where, timeout, environment=environment) as ranks:
        ended = ranks.wait(_STARTING + timeout, without=(3,) if way == "stop" else ())
        _names(_others(ended, 3), 3)
    if way != "stop":
        assert max(one.seconds for one in ended) < ended[3].seconds + _AT_ONCE  # nobody waits for the timeout


def test_garbage_in_shared_memory() -> None:
    with RankProcesses(2, "fault_cases:in_layers", 1, "garbage", 5.0) as ranks:
        ended = ranks.wait(_STARTING)
    _names(ended[:1], 1)
    assert ended[1].code > 0


@pytest.mark.parametrize(
    ("way", "text"),
    first_of(
        [
            ("version", "the version and layout of rank 1 is 'cpumoe 0.0.1"),
            (
                "CPUMOE_KV_CACHE=int8",
                "the way of loading of rank 1 is 'kv_cache=int8', and that of rank 0 is 'kv_cache=None'",
            ),
            ("layout", 'the version and layout of rank 1 is "layout '),
            ("size", 'the version and layout of rank 1 is "layout '),
            ("timeout", "the version and layout of rank 1 is 'timeout 7.0'"),
            ("tiles", "the version and layout of rank 1 is 'bf16 products with AMX tiles (CPUMOE_ISA)'"),
            (
                "capability",
                'the version and layout of rank 1 is "PyTorch\'s kernels for DEFAULT (ATEN_CPU_CAPABILITY)"',
            ),
            ("checkpoint", "the checkpoint of rank 1 is"),
            ("missing", "rank 1 has failed: CheckpointError"),
            ("scheme", "the way of loading of rank 1 is 'scheme=w8a8'"),
            ("linears", "the way of loading of rank 1 is 'linears=w8a8'"),
            ("kv_cache", "the way of loading of rank 1 is 'kv_cache=int8'"),
            ("dtype", "the way of loading of rank 1 is 'dtype=torch.bfloat16'"),
            ("attention", "the way of loading of rank 1 is 'attn_implementation=eager'"),
            ("CPUMOE_SCHEME", "the way of loading of rank 1 is 'scheme=w8a8'"),
            ("CPUMOE_STEPS=0", "the way of loading of rank 1 is 'CPUMOE_STEPS=0'"),
            ("CPUMOE_BACKEND=reference", "rank 1 has failed: ValueError: experts on the backend 'reference'"),
            ("no native decoder", "all ranks must run the same model with the same layout"),
        ],
        2,
    ),
)
def test_mismatch(way: str, text: str, folder: Path, other_folder: Path) -> None:
    with RankProcesses(2, "fault_cases:mismatched", 1, way, str(folder), str(other_folder)) as ranks:
        ended = ranks.wait(_STARTING)
    _names(_others(ended, 1), 1, text)
    assert ended[1].code > 0
    assert not any("at loaded" in one.output for one in ended)  # before the first token


@pytest.mark.full
def test_killed_under_torchrun(folder: Path) -> None:
    """As a user starts them: the command ends with an error, and says why."""
    _, output, code = run_torchrun(2, "fault_cases:killed", "decoding", 1, str(folder))
    assert code != 0
    assert "Signal 14 (SIGALRM) received" in output or "rank 1 has ended" in output
    assert not shared_files()
