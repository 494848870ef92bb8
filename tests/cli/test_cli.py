"""The command as a user meets it: real processes, real files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run_command

import cpumoe
from cpumoe.cli import _COMMANDS, main

TINY = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--topk", "2", "--tokens", "1,5"]


def test_a_process_of_its_own() -> None:
    """The other tests of this file call ``main``."""
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["isa"] == cpumoe.isa(), done.stderr


def test_help_and_version() -> None:
    assert "COMMAND" in run_command("--help").stdout
    assert run_command("--version").stdout.strip() == f"cpumoe {cpumoe.__version__}"
    assert run_command().returncode == 2
    assert run_command("dance").returncode == 2


def test_help_and_wrong_options_import_nothing_heavy() -> None:
    """PyTorch and transformers take seconds, in which a user waits for one line."""
    program = """
import contextlib, io, sys
from cpumoe import cli
wrong = [["serve", "--nonsense"], ["quantize", "x"], ["eval", "x", "--stride", "0"], ["dance"], []]
help = [[module.__name__.rpartition(".")[2], "--help"] for module in cli._COMMANDS]
for words in [["--version"], ["--help"], *wrong, *help]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(words)
        except SystemExit:
            pass
        else:
            raise AssertionError(words)
    print(words, sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 7 + len(_COMMANDS), done.stdout + done.stderr
    assert all(line.endswith(" []") for line in lines), done.stdout


@pytest.mark.parametrize(
    ("words", "message", "shown_by"),
    [
        (["serve", "--nonsense"], "cpumoe serve: unrecognized arguments: --nonsense", "cpumoe serve"),
        (
            ["serve", "m", "--prot", "1"],
            "cpumoe serve: unrecognized arguments: --prot; did you mean --port?",
            "cpumoe serve",
        ),
        (["explain", "w4a8", "-q"], "cpumoe explain: unrecognized arguments: -q", "cpumoe explain"),
        (["inspect", "a", "b"], "cpumoe inspect: unrecognized arguments: b", "cpumoe inspect"),
        (["-v", "generate"], "cpumoe generate: the following arguments are required: MODEL", "cpumoe generate"),
        (["--nonsense"], "cpumoe: unrecognized arguments: --nonsense", "cpumoe"),
        (["-x"], "cpumoe: unrecognized arguments: -x", "cpumoe"),
        (["--verbos=1"], "cpumoe: argument -v/--verbose: ignored explicit argument '1'", "cpumoe"),
        (["--nonsense", "generate"], "cpumoe: unrecognized arguments: --nonsense", "cpumoe"),
        (["-v", "--verison", "dance"], "cpumoe: unrecognized arguments: --verison; did you mean --version?", "cpumoe"),
        (["generate", "-x"], "cpumoe generate: unrecognized arguments: -x", "cpumoe generate"),
        (["generate", "--bogus"], "cpumoe generate: unrecognized arguments: --bogus", "cpumoe generate"),
        (["doctor", "--schme"], "cpumoe doctor: unrecognized arguments: --schme", "cpumoe doctor"),
        (["-v"], "cpumoe: the following arguments are required: COMMAND", "cpumoe"),
        (["eval", "m", "--text", "--experts"], "cpumoe eval: argument --text: expected one argument", "cpumoe eval"),
        (["eval", "m", "--", "--text"], "cpumoe eval: the following arguments are required: --text", "cpumoe eval"),
    ],
)
def test_what_is_wrong_comes_first_and_names_the_help(words: list[str], message: str, shown_by: str) -> None:
    done = run_command(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [message, f"{shown_by} --help shows what is accepted"]


def test_a_text_that_looks_like_an_option_is_a_text() -> None:
    from cpumoe.cli import _parser
    from cpumoe.cli.parser import parse

    assert parse(_parser(), ["generate", "m", "--", "--prompt"]).prompt == "--prompt"
    assert parse(_parser(), ["generate", "m", "--max-new 3"]).prompt == "--max-new 3"
    assert parse(_parser(), ["generate", "m", "--stop=--x", "--max-new", "3"]).max_new_tokens == 3
    assert parse(_parser(), ["inspect", "-"]).model == Path("-")


def test_doctor() -> None:
    done = run_command("doctor")
    assert done.returncode == 0, done.stderr
    assert "in use" in done.stdout and "oneDNN guard" in done.stdout and "NUMA nodes" in done.stdout
    facts = json.loads(run_command("doctor", "--json").stdout)
    assert facts["isa"] == cpumoe.isa()
    assert all(test["passed"] for test in facts["self_tests"])
    assert {t["isa"] for t in facts["self_tests"]} == {s["name"] for s in facts["instruction_sets"] if s["supported"]}


def test_explain() -> None:
    done = run_command("explain", "w8a8")
    assert done.returncode == 0 and "chosen: native" in done.stdout
    assert "aten       no: scheme w8a8" in done.stdout
    told = json.loads(run_command("explain", "w4a8-g32", "--json").stdout)
    assert told["chosen"] == "native" and [b["backend"] for b in told["backends"]] == [
        "native",
        "aten",
        "reference",
    ]
    refused = run_command("explain", "w4a8", "--routing", "unspecified")
    assert refused.returncode == 1 and "no backend serves this layer" in refused.stdout
    bad = run_command("explain", "w4a8-g48")
    assert bad.returncode == 2 and "group_size=48; a multiple of 32" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.fixture
def small_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotation through 1 GB is for measuring; here it only takes time."""
    from cpumoe.bench import workload

    monkeypatch.setattr(workload, "ROTATED_BYTES", 1)


def test_bench(tmp_path: Path, small_rotation: None) -> None:
    from cpumoe.cli import main

    path, picture = tmp_path / "rows.json", tmp_path / "roofline.png"
    arguments = ["bench", *TINY, "--scheme", "w4a8-g32", "--scheme", "w8a8", "--seconds", "0.05"]
    assert main([*arguments, "--json", str(path), "--plot", str(picture), "--isa", "scalar"]) == 0
    rows = json.loads(path.read_text())
    assert [(r["scheme"], r["tokens"]) for r in rows] == [
        ("w4a8-g32", 1),
        ("w4a8-g32", 5),
        ("w8a8", 1),
        ("w8a8", 5),
    ]
    for row in rows:
        assert row["isa"] == "scalar" and row["shape"] == "64x32x4x2"
        assert 0 < row["ms_min"] <= row["ms_median"]
        for key in ("tops", "weight_gbps", "dram_gbps", "dram_fraction", "peak_tops", "compute_fraction"):
            assert row[key] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_packs_few_layers_however_small_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cpumoe.bench import workload
    from cpumoe.cli import main

    packed = []
    pack = workload.random_experts
    monkeypatch.setattr(workload, "random_experts", lambda *args, **options: packed.append(1) or pack(*args, **options))
    assert main(["bench", *TINY, "--scheme", "w8a8", "--seconds", "0.01"]) == 0
    assert len(packed) <= 8
    assert "the weights of 64x32x4x2 are so small that they may stay in a cache" in capsys.readouterr().out


def test_layers_of_a_rotation_have_memory_of_their_own_and_the_same_results() -> None:
    from cpumoe.bench.shapes import Shape
    from cpumoe.bench.workload import MOST_CALLS, exceed_caches, random_routing, rotating_experts

    shape = Shape("tiny", 64, 32, 4, 2)
    layers = rotating_experts(shape, cpumoe.Scheme.parse("w8a8"))
    assert len(layers) == MOST_CALLS and not exceed_caches(layers)
    assert len({layer.get_buffer("down_packed").data_ptr() for layer in layers}) == MOST_CALLS
    call = (torch.randn(3, 64), *random_routing(shape, 3, 0))
    assert torch.equal(layers[8](*call), layers[0](*call)) and not torch.equal(layers[1](*call), layers[0](*call))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "positive numbers"),
        (["--tokens", "1,x"], "positive numbers"),
        (["--hidden", "64"], "needs --hidden, --intermediate, --experts and --topk"),
        ([*TINY[:6], "--topk", "9"], "--topk 9; 1 to 4"),
        (["--shape", "gpt-5"], "invalid choice"),
        (["--scheme", "w3a8"], "scheme 'w3a8' is not known"),
        (["--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
        (["--isa", "avx1024"], "is not known"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str) -> None:
    done = run_command("bench", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_explain_of_a_checkpoint() -> None:
    folder = Path(__file__).parents[1] / "data" / "checkpoints" / "gptoss-w4a8-g32"
    done = run_command("explain", str(folder))
    assert done.returncode == 0 and "2 layers: w4a8-g32, swiglu_oai" in done.stdout and "chosen: native" in done.stdout
    assert "decoder: 2 layers" in done.stdout and "mixer: Gqa heads" in done.stdout
    facts = json.loads(run_command("explain", str(folder), "--json").stdout)
    assert facts["chosen"] == "native" and facts["layers"] == 2
    first = facts["decoder"]["layers"][0]
    assert first["mixer"]["kind"] == "Gqa" and first["mixer"]["sinks"] == "layers.0.self_attn.sinks [4]"


@pytest.mark.full
def test_demo_finds_the_same_bits() -> None:
    done = run_command("demo", "--layer", "--experts", "8")
    assert done.returncode == 0, done.stderr
    assert "bits per weight" in done.stdout and "faster by" in done.stdout and "DIFFERENT" not in done.stdout


def test_shapes_and_their_schemes() -> None:
    from cpumoe.bench.shapes import SHAPES
    from cpumoe.bench.workload import fitting_scheme

    g128 = cpumoe.Scheme.parse("w4a8-g128")
    assert str(fitting_scheme(g128, SHAPES["gpt-oss-20b"])) == "w4a8-g64"
    assert str(fitting_scheme(g128, SHAPES["qwen3-30b-a3b"])) == "w4a8-g128"
    for name, fitting in {
        "w8a8": "w8a8",
        "w4a16-g128": "w4a16-g64",
        "w8a8-g128": "w8a8-g64",
        "w4a16-g128-asym+int8": "w4a16-g64-asym+int8",
        "nvfp4a16": "nvfp4a16",
    }.items():
        assert str(fitting_scheme(cpumoe.Scheme.parse(name), SHAPES["gpt-oss-20b"])) == fitting


def test_tracebacks_are_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    command = ["inspect", str(tmp_path / "nothing")]
    assert main(command) == 2
    assert "Traceback" not in capsys.readouterr().err
    for asked in ("-v", "CPUMOE_DEBUG"):
        if asked == "CPUMOE_DEBUG":
            monkeypatch.setenv(asked, "1")
        assert main([*command, *([asked] if asked == "-v" else [])]) == 2
        told = capsys.readouterr().err
        assert "Traceback" in told and told.splitlines()[-1].startswith("cpumoe inspect: ")
    monkeypatch.setenv("CPUMOE_DEBUG", "yes")
    assert main(command) == 2
    assert "CPUMOE_DEBUG='yes'; 0 (no tracebacks) and 1 are accepted" in capsys.readouterr().err


def test_explain_names_the_row_of_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for name, *_ in cpumoe._core.weight_formats()}
    for scheme, row in (("w4a8", "int4"), ("w4a8-g96", "int4-g32"), ("w4a8-g256", "int4-g128"), ("w8a8", "int8")):
        sizes = ["--hidden", "768", "--intermediate", "768"]
        assert main(["explain", scheme, *sizes]) == 0
        assert f"kernels: {row} on {cpumoe.isa()}" in capsys.readouterr().out and row in names
