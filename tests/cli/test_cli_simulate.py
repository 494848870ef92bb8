"""``cpumoe simulate`` as a user meets it: real processes, with costs from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run_command

from cpumoe.bench.rank_costs import measure_costs
from cpumoe.bench.shapes import Shape
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.simulation.kernel_costs import Curve, KernelCosts
from cpumoe.simulation.routing_trace import save_routing

SHAPE = ["--shape", "256,128,16,2,3"]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    line = Curve(((1.0, 1e-5), (64.0, 1e-4)))
    exchange = {name: Curve(((1e3, 1e-6), (1e6, 1e-4))) for name in ("gather", *(kind.value for kind in Exchange))}
    linear = Curve(((1.0, 1e-11), (64.0, 1e-10)))
    KernelCosts(
        256, 128, "w4a8-g32", 1, 2, 6e4, 1e-5, 1e-6, {128: line, 32: line.faster(3)}, linear, exchange, 2e-5
    ).save(path)
    return str(path)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("simulate", *arguments)


def test_a_line_for_every_layout_and_number_of_ranks(costs: str) -> None:
    done = simulate(*SHAPE, "--costs", costs, "--ranks", "2,8", "--tokens", "64", "--routing", "zipf")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "model    256,128,16,2,3, w4a8-g32"
    assert lines[1] == "steps    64 tokens on all ranks, routing zipf"
    assert lines[3] == "network  20 us and 12.5 GB/s a node; 20 us of a rank's time per message"
    heading = next(number for number, line in enumerate(lines) if line.startswith("layout"))
    table = [line.split() for line in lines[heading + 1 : heading + 7]]
    assert [row[:2] for row in table] == [[name, n] for name in ("tp", "ep", "ep-balanced") for n in ("2", "8")]
    assert table[1][2:] == ["-"] * 7
    assert lines[-1] == (
        "tp on 8 ranks: the intermediate size 128 of the experts in 8 slices, which are multiples of 32; "
        "up to 4 slices, or expert parallelism, are accepted"
    )


def test_json_and_a_plot(costs: str, tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    given = ["--layout", "ep", "--ranks", "1,4", "--tokens", "64", "--network", "5,10,1,20", "--ranks-per-node", "2"]
    done = simulate(*SHAPE, "--costs", costs, *given, "--message-us", "1", "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["latency_us"], told["gigabytes_per_second"], told["message_us"]) == pytest.approx((5, 10, 1))
    one, four = told["predictions"]
    assert one["exchange"] == 0 and four["exchange"] > 0 and one["experts"] > four["experts"]
    assert four["seconds"] == pytest.approx(four["experts"] + four["exchange"] + four["rest"])
    assert four["tokens_per_second"] == pytest.approx(64 / four["seconds"])
    assert "<svg" in picture.read_text()


def test_recorded_routing_and_a_faster_rank(costs: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    save_routing({"layer": torch.arange(256).remainder(16).view(128, 2)}, path)
    given = [*SHAPE, "--costs", costs, "--layout", "ep", "--ranks", "1", "--tokens", "64", "--json"]
    slow, fast = (
        json.loads(simulate(*given, "--routing", str(path), *more).stdout)["predictions"][0]
        for more in ([], ["--speed", "4"])
    )
    assert slow["imbalance"] == 1 and slow["seconds"] == pytest.approx(4 * fast["seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--costs", "missing.json"], "missing.json: No such file"),
        (["--costs", "COSTS"], "measured for a hidden size of 256 and an intermediate size of 128; qwen3-30b-a3b has"),
        ([*SHAPE, "--costs", "COSTS", "--scheme", "w8a8"], "--scheme has no effect with --costs"),
        ([*SHAPE, "--costs", "COSTS", "--threads", "2"], "--threads has no effect with --costs"),
        ([*SHAPE, "--costs", "COSTS", "--layout", "tp", "--exchange", "all_to_all"], "--exchange has no effect"),
        ([*SHAPE, "--costs", "COSTS", "--layout", "ep", "--spare", "2"], "--spare has no effect without"),
        ([*SHAPE, "--costs", "COSTS", "--routing", "none"], "--routing none; uniform, zipf, demo, or a file"),
        (
            [*SHAPE, "--costs", "COSTS", "--layout", "tp", "--ranks", "5"],
            "the intermediate size 128 of the experts in 5 slices",
        ),
        ([*SHAPE, "--costs", "COSTS", "--plot", "nowhere/x.png"], "there is no folder"),
        (["--shape", "256,128,16,2"], "five whole numbers H,I,E,K,LAYERS are accepted"),
        (["--shape", "256,100,16,2,3"], "H and I are multiples of 32"),
        (["--network", "5"], "argument --network: '5'; LAT_US,GB_S or"),
        (["--network", "5,0"], "a rate above 0"),
        (["--ranks", "8,0"], "positive numbers separated by commas"),
        (["--scheme", "w4a8-g512"], "groups of 512 do not divide"),
    ],
)
def test_refused_with_a_sentence(costs: str, arguments: list[str], message: str) -> None:
    done = simulate(*(costs if word == "COSTS" else word for word in arguments))
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert message in done.stderr


@pytest.mark.full
def test_a_plot_without_matplotlib(costs: str, tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from cpumoe_command import main; sys.exit(main())"
    given = ["simulate", *SHAPE, "--costs", costs, "--plot", str(tmp_path / "x.png")]
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--plot needs matplotlib: pip install 'cpumoe[bench]'" in done.stderr


@pytest.mark.full
def test_measured_costs_of_real_ranks() -> None:
    found = measure_costs(Shape("small", 128, 64, 8, 2), Scheme.parse("w4a8-g32"), 1, seconds=0.002)
    assert (found.hidden, found.intermediate, found.scheme, found.threads) == (128, 64, "w4a8-g32", 1)
    assert sorted(found.experts) == [32, 64] and set(found.exchange) == {"gather", *(kind.value for kind in Exchange)}
    assert found.call_seconds > 0 and found.message_seconds > 0 and found.expert_bytes > 3 * 128 * 64 / 2
    assert KernelCosts.from_json(found.to_json()) == found
