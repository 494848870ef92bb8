"""``cpumoe plan`` as a user meets it, on real checkpoints."""

from __future__ import annotations

import json
import subprocess

import pytest
from changed_checkpoints import CHECKPOINTS
from commands import run_command

pytest.importorskip("transformers")

PACKED = str(CHECKPOINTS / "qwen3moe-w4a8-g32-packed")


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("plan", PACKED, *arguments)


def test_a_line_for_every_rank() -> None:
    done = plan("--tp", "4", "--ep", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["checkpoint", PACKED]
    assert lines[1] == "layout      tp 4 ep: 4 ranks on 2 nodes, exchange all_reduce"
    assert lines[2] == "experts     8 per layer in 2 layers, 2 per token, w4a8-g32"
    heading = next(number for number, line in enumerate(lines) if line.startswith("rank  node  holds"))
    ranks = lines[heading + 1 : heading + 5]
    assert [line.split()[:4] for line in ranks] == [
        [str(rank), str(rank // 2), "experts", f"{2 * rank}..{2 * rank + 1}"] for rank in range(4)
    ]
    assert "768 B             0 B" in ranks[0] and "0 B           768 B" in ranks[1]
    assert len(lines) == heading + 7 and lines[-1].startswith("the largest rank has ")
    assert lines[-1].endswith("; a rank sends up to 768 B per token and layer, 1.5 kB per token")


def test_json_and_empty_ranks() -> None:
    told = json.loads(plan("--dp", "10", "--ep", "--exchange", "all_to_all", "--json").stdout)
    assert told["folder"] == PACKED and told["exchange"] == "all_to_all" and told["nodes"] == 1
    assert told["experts"] == {"layers": 2, "count": [8], "per_token": [2], "schemes": ["w4a8-g32"]}
    assert [rank["dp_rank"] for rank in told["ranks"]] == list(range(10))
    assert [len(rank["layers"][1]["experts"]) for rank in told["ranks"]] == [1] * 8 + [0] * 2
    for rank in told["ranks"]:
        assert rank["bytes"] == rank["experts_bytes"] + rank["other_bytes"]
        layer, every = rank["sent_per_token_and_layer"], rank["sent_per_token"]
        assert every == {name: pytest.approx(2 * sent) for name, sent in layer.items()}
    assert told["ranks"][9]["experts_bytes"] == 0
    text = plan("--dp", "10", "--ep").stdout
    assert "experts none" in text and text.endswith("; no experts for ranks from 8 on\n")


def test_every_nth_expert() -> None:
    lines = plan("--tp", "4", "--ep", "--expert-placement-strategy", "round_robin").stdout.splitlines()
    assert lines[1] == "layout      tp 4 ep round_robin: 4 ranks on 1 node, exchange all_reduce"
    assert [line.split()[3] for line in lines if line.split()[2:3] == ["experts"]] == [
        f"{rank},{rank + 4}" for rank in range(4)
    ]


def test_one_rank_sends_nothing() -> None:
    text = plan().stdout
    assert "layout      one rank" in text and "sent" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "the intermediate size 64 of the experts in 3 slices, which are multiples of 32; up to 2"),
        (["--tp", "4"], "64 of the experts in 4 slices, which are multiples of 32; up to 2 slices, or expert"),
        (["--dp", "2", "--exchange", "all_reduce"], "exchange=all_reduce, and ranks have different tokens"),
        (["--tp", "2", "--exchange", "all_to_all"], "all_to_all without expert parallelism"),
    ],
)
def test_refused_with_the_numbers(arguments: list[str], message: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("cpumoe plan: ") and message in done.stderr
