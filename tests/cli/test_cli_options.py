"""Every option of every command: where it means something, and that it is refused by its own name where it does not."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from changed_checkpoints import CHECKPOINTS
from tiny_models import write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe import cli
from cpumoe.cli.arguments import whole_number

ALWAYS = ""
LOADING = {
    "--scheme": "a float checkpoint",
    "--linears": ALWAYS,
    "--cache": "something is packed",
    "--activations": "a quantised MODEL",
    "--kv-cache": "steps are one call",
    "--download": "MODEL is an id",
    "--threads": ALWAYS,
    "--verbose": ALWAYS,
}
SAMPLING = {
    "--max-new-tokens": ALWAYS,
    "--greedy": ALWAYS,
    "--temperature": "not --greedy",
    "--top-p": "tokens are sampled",
    "--top-k": "tokens are sampled",
    "--min-p": "tokens are sampled",
    "--seed": "tokens are sampled",
    "--stop": ALWAYS,
}
RANKS = {
    **dict.fromkeys(("--tp", "--dp", "--pcp", "--rank-timeout"), ALWAYS),
    **dict.fromkeys(("--ep", "--exchange"), "several ranks"),
    "--expert-placement-strategy": "--ep",
    "--sp": "several ranks that are tensor parallel",
    "--ranks": "no layout",
}
OF_A_LAYER = ("--hidden", "--intermediate", "--experts", "--activation", "--not-gated", "--routing", "--scale-dtype")

OF_BENCHED_LAYERS = ("--shape", "--tokens", "--routing", "--dtype", "--seconds", "--plot", "--isa")
OF_BENCHED_MODELS = ("--prompt", "--generate", "--depth", "--batch", "--repetitions")

#: Command -> option -> when it means something. ``serve`` has a test file of its own.
MEANING: dict[str, dict[str, str]] = {
    "generate": {
        **LOADING,
        **SAMPLING,
        **RANKS,
        "--prompt-file": "no PROMPT",
        "--chat": "a chat template",
        "--no-stream": "not --json",
        "--json": ALWAYS,
    },
    "chat": {**LOADING, **SAMPLING, "--system": ALWAYS, "--no-history": ALWAYS},
    "eval": {
        **LOADING,
        "--text": ALWAYS,
        "--against": "a float model",
        "--experts": ALWAYS,
        "--heatmap": ALWAYS,
        "--window": "text and model fill it",
        "--stride": "no more than the window, which is less than the text",
        "--limit": ALWAYS,
        "--json": ALWAYS,
    },
    "quantize": {
        "--scheme": ALWAYS,
        "--linears": ALWAYS,
        "--format": ALWAYS,
        "--calibration": ALWAYS,
        "--calibration-samples": "--calibration",
        "--calibration-length": "--calibration",
        "--download": "SRC is an id",
        "--threads": ALWAYS,
        "--json": ALWAYS,
        "--verbose": ALWAYS,
    },
    "inspect": {
        "--scheme": "a float checkpoint",
        "--deep": ALWAYS,
        "--download": "an id",
        "--json": ALWAYS,
        "--verbose": ALWAYS,
    },
    "plan": {
        **dict.fromkeys(("--tp", "--dp", "--pcp"), ALWAYS),
        **dict.fromkeys(("--ep", "--exchange"), "several ranks"),
        "--expert-placement-strategy": "--ep",
        "--sp": "several ranks that are tensor parallel",
        "--nodes": "it divides the ranks",
        "--scheme": "a float checkpoint",
        "--download": "an id",
        "--json": ALWAYS,
        "--verbose": ALWAYS,
    },
    "simulate": {
        **dict.fromkeys(("--shape", "--ranks", "--layout", "--tokens", "--routing", "--json", "--plot"), ALWAYS),
        **dict.fromkeys(("--network", "--ranks-per-node", "--message-us", "--speed"), ALWAYS),
        "--exchange": "whole experts on ranks",
        "--spare": "--layout ep-balanced",
        "--costs": ALWAYS,
        **dict.fromkeys(("--scheme", "--save-costs", "--seconds", "--threads"), "no --costs"),
        "--verbose": ALWAYS,
    },
    "check": {
        "--scheme": "a float checkpoint",
        "--tokens": ALWAYS,
        "--layers": "they exist",
        "--tolerance": ALWAYS,
        "--isa": "it runs here",
        "--download": "MODEL is an id",
        "--threads": ALWAYS,
        "--json": ALWAYS,
        "--verbose": ALWAYS,
    },
    "explain": {
        **dict.fromkeys(OF_A_LAYER, "a SCHEME"),
        "--activations": "a MODEL",
        "--download": "a MODEL that is an id",
        "--json": ALWAYS,
        "--verbose": ALWAYS,
    },
    "bench": {
        **dict.fromkeys(OF_BENCHED_LAYERS, "no MODEL"),
        **dict.fromkeys(("--hidden", "--intermediate", "--experts", "--topk"), "no MODEL, and all four"),
        **dict.fromkeys(OF_BENCHED_MODELS, "a MODEL"),
        **dict.fromkeys(("--linears", "--cache", "--activations", "--kv-cache", "--download"), "a MODEL"),
        "--scheme": "it fits the shape, or a float MODEL",
        "--json": ALWAYS,
        "--threads": ALWAYS,
        "--verbose": ALWAYS,
    },
    "demo": {
        "--tokens": "not --layer",
        "--layer": ALWAYS,
        "--scheme": "--layer",
        "--experts": "--layer",
        "--threads": ALWAYS,
        "--verbose": ALWAYS,
    },
    "doctor": {"--json": ALWAYS, "--threads": ALWAYS, "--verbose": ALWAYS},
}

FLOAT, QUANTISED, TEXT = "{float}", "{quantised}", "{text}"
GENERATE, EVAL = ["generate", FLOAT, "x"], ["eval", FLOAT, "--text", TEXT, "--scheme", "float"]
OWN_SHAPE = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--topk", "2"]

REFUSED: list[tuple[list[str], str]] = [
    ([*GENERATE, "--scheme", "float", "--ep"], "--ep has no effect with one rank"),
    ([*GENERATE, "--scheme", "float", "--exchange", "all_to_all"], "--exchange has no effect with one rank"),
    (
        [*GENERATE, "--scheme", "float", "--expert-placement-strategy", "round_robin"],
        "--expert-placement-strategy has no effect with one rank",
    ),
    ([*GENERATE, "--scheme", "float", "--sp"], "--sp has no effect with --tp 1"),
    ([*GENERATE, "--ranks", "numa", "--tp", "2"], "--ranks numa with a layout"),
    (["generate", QUANTISED, "x", "--scheme", "w4a8-g32"], "--scheme w4a8-g32: {quantised} is quantised already"),
    (["chat", QUANTISED, "--scheme", "w4a8-g32"], "--scheme w4a8-g32: {quantised} is quantised already"),
    (
        ["eval", QUANTISED, "--text", TEXT, "--scheme", "w8a8"],
        "--scheme w8a8: {quantised} is quantised already; leave it out",
    ),
    (["check", QUANTISED, "--scheme", "w8a8"], "quantised already; leave it out"),
    (["inspect", QUANTISED, "--scheme", "w8a8"], "quantised already; leave it out"),
    ([*GENERATE], "{float} is a float checkpoint: add --scheme w4a8-g128 (or another)"),
    (["chat", FLOAT], "{float} is a float checkpoint: add --scheme w4a8-g128 (or another)"),
    (["eval", FLOAT, "--text", TEXT], "or --scheme float to leave them to transformers"),
    ([*GENERATE, "--scheme", "w3a8"], "argument --scheme: scheme 'w3a8' is not known; w4a8, w8a8, w4a16, w8a16 and"),
    ([*GENERATE, "--linears", "w3a8"], "argument --linears: scheme 'w3a8' is not known"),
    ([*EVAL, "--linears", "float"], "argument --linears: scheme 'float' is not known"),
    (["quantize", FLOAT, "x", "--scheme", "w3a8"], "argument --scheme: scheme 'w3a8' is not known"),
    (["quantize", FLOAT, "x", "--linears", "w3a8"], "are accepted, and so is float"),
    ([*GENERATE, "--scheme", "w4a8-g128"], "--scheme w4a8-g128: groups of 128 do not divide a hidden size of 64 and"),
    (["quantize", FLOAT, "x"], "an intermediate size of 32; w4a8-g32, w4a8 and w8a8 fit"),
    ([*GENERATE, "--scheme", "float", "--cache", "x"], "--cache has no effect with --scheme float"),
    (["chat", FLOAT, "--scheme", "float", "--cache", "x"], "--cache has no effect with --scheme float"),
    ([*EVAL, "--cache", "x"], "--cache has no effect with --scheme float"),
    ([*GENERATE, "--download"], "--download has no effect: {float} is a folder"),
    (["chat", FLOAT, "--download"], "--download has no effect: {float} is a folder"),
    ([*EVAL, "--download", "--against", FLOAT], "--download has no effect: {float} and {float} are folders"),
    (["quantize", FLOAT, "x", "--download"], "--download has no effect"),
    (["inspect", FLOAT, "--download"], "--download has no effect"),
    (["plan", QUANTISED, "--scheme", "w8a8"], "quantised already; leave it out"),
    (["plan", FLOAT, "--download"], "--download has no effect"),
    (["plan", FLOAT, "--ep"], "--ep has no effect with one rank"),
    (["plan", FLOAT, "--exchange", "all_reduce"], "--exchange has no effect with one rank"),
    (
        ["plan", FLOAT, "--tp", "2", "--expert-placement-strategy", "linear"],
        "--expert-placement-strategy has no effect without --ep",
    ),
    (["plan", FLOAT, "--dp", "2", "--sp"], "--sp has no effect with --tp 1"),
    (["plan", FLOAT, "--dp", "4", "--nodes", "3"], "4 ranks on 3 nodes; a number of nodes that divides them"),
    *(
        (["simulate", "--costs", "x", option, value], f"{option} has no effect with --costs")
        for option, value in (
            ("--scheme", "w8a8"),
            ("--save-costs", "y"),
            ("--seconds", "1"),
            ("--threads", "1"),
        )
    ),
    (["simulate", "--costs", "x", "--layout", "tp", "--exchange", "all_to_all"], "--exchange has no effect without"),
    (["simulate", "--costs", "x", "--layout", "ep", "--spare", "1"], "--spare has no effect without"),
    (["plan", FLOAT, "--tp", "0"], "argument --tp: '0'; a whole number from 1"),
    (["check", FLOAT, "--download"], "--download has no effect"),
    (["explain", QUANTISED, "--download"], "--download has no effect"),
    *(
        (
            [*start, "--scheme", "w4a16-g32", "--activations", "int8"],
            "--activations int8: {float} is a float checkpoint",
        )
        for start in (GENERATE, ["chat", FLOAT], EVAL, ["serve", FLOAT])
    ),
    *(
        (
            [*start, "--scheme", "float", "--kv-cache", "int8"],
            "--kv-cache int8 is for steps in one call of the core, which --scheme float has not",
        )
        for start in (GENERATE, ["chat", FLOAT], EVAL, ["serve", FLOAT])
    ),
    ([*GENERATE, "--scheme", "w4a8", "--kv-cache", "fp8"], "argument --kv-cache: invalid choice: 'fp8'"),
    (["explain", "w4a16", "--activations", "int8"], "--activations has no effect for the scheme w4a16"),
    (["explain", "w4a8", "--download"], "--download has no effect for the scheme w4a8"),
    ([*GENERATE, "--prompt-file", "y"], "both PROMPT and --prompt-file are given"),
    ([*GENERATE, "--json", "--no-stream"], "--no-stream has no effect with --json"),
    (["generate", "{plain}", "x", "--chat"], "this model's tokenizer has no chat template"),
    *(
        ([*start, *contradiction], message)
        for start in (GENERATE, ["chat", FLOAT])
        for contradiction, message in (
            (["--greedy", "--temperature", "1"], "--temperature has no effect with --greedy"),
            (["--greedy", "--top-p", "0.5"], "--top-p has no effect with --greedy"),
            (["--greedy", "--top-k", "5"], "--top-k has no effect with --greedy"),
            (["--greedy", "--min-p", "0.5"], "--min-p has no effect with --greedy"),
            (["--greedy", "--seed", "0"], "--seed has no effect with --greedy"),
            (["--temperature", "0", "--seed", "1"], "--seed has no effect with --temperature 0, which is --greedy"),
            (["--top-p", "0.5"], "--top-p has no effect for a model whose generation_config.json does not ask for"),
            (["--top-k", "5"], "--top-k has no effect for a model"),
            (["--min-p", "0.5"], "does not ask for sampling; add --temperature 1"),
            (["--seed", "0"], "--seed has no effect for a model"),
        )
    ),
    ([*EVAL, "--against", QUANTISED], "--against {quantised}: this is quantised; a float model is accepted"),
    ([*EVAL, "--window", "100000"], "--window 100000: the model has 2048 positions; 1 to 2048 are accepted"),
    ([*EVAL, "--window", "2048"], "--window 2048: the text has 1200 tokens; 1 to 1200 are accepted"),
    ([*EVAL, "--window", "0"], "argument --window: '0'; a whole number from 1 is accepted"),
    ([*EVAL, "--window", "16", "--stride", "17"], "--stride 17; 1 to 16 (the window) are accepted"),
    ([*EVAL, "--stride", "1025"], "--stride 1025; 1 to 1024 (the window) are accepted"),
    ([*EVAL, "--stride", "8", "--limit", "30"], "--stride has no effect: the "),
    ([*EVAL, "--limit", "0"], "argument --limit: '0'; a whole number from 1 is accepted"),
    (
        ["quantize", FLOAT, "x", "--calibration-samples", "4"],
        "--calibration-samples has no effect without --calibration",
    ),
    (["quantize", FLOAT, "x", "--calibration-length", "4"], "--calibration-length has no effect without --calibration"),
    (["quantize", FLOAT, "x", "--calibration", TEXT, "--calibration-length", "1"], "a whole number from 2 is accepted"),
    (["check", QUANTISED, "--layers", "99"], "--layers 99"),
    (["check", QUANTISED, "--isa", "avx1024"], "argument --isa: 'avx1024' is not known; accepted here are scalar"),
    *(
        (["explain", QUANTISED, option, value], f"{option} has no effect for a model, whose layers {{quantised}} has")
        for option, value in zip(OF_A_LAYER, ("64", "32", "5", "gelu", "", "default", "bf16"), strict=True)
    ),
    (["explain", "w4a8", "--hidden", "5"], "argument --hidden: '5'; a multiple of 32 from 32 is accepted"),
    (["explain", "w4a8", "--experts", "0"], "argument --experts: '0'; a whole number from 1 is accepted"),
    (["explain", "w4a8-g128", "--hidden", "96"], "do not divide a hidden size of 96 and an intermediate size of 768"),
    (["explain", "w4a8", "--activation", "swiglu_oai", "--not-gated"], "--not-gated does not go with --activation"),
    *((["bench", option, "64"], "needs --hidden, --intermediate") for option in OWN_SHAPE[::2]),
    (["bench", *OWN_SHAPE, "--scheme", "w4a8-g128"], "--scheme w4a8-g128 for 64x32x4x2: groups of 128 do not divide"),
    (["bench", "--shape", "gpt-oss-20b", "--scheme", "w4a8-g128"], "w4a8-g32, w4a8-g64, w4a8 and w8a8 fit"),
    (["bench", "--isa", "neon_dot" if "x86" in os.uname().machine else "avx2"], "cannot run here"),
    (["bench", "--seconds", "0"], "argument --seconds: '0'; a number above 0 is accepted"),
    *(
        (["bench", QUANTISED, option, value], f"{option} has no effect with MODEL, which has layers of its own")
        for option, value in zip(
            OF_BENCHED_LAYERS, ("gpt-oss-20b", "1", "uniform", "fp32", "1", "x.png", "scalar"), strict=True
        )
    ),
    *((["bench", option, "1"], f"{option} has no effect without MODEL") for option in OF_BENCHED_MODELS),
    *(
        (["bench", option, value], f"{option} has no effect without MODEL")
        for option, value in (
            ("--linears", "w8a8"),
            ("--cache", "x"),
            ("--activations", "int8"),
            ("--kv-cache", "int8"),
            ("--download", ""),
        )
    ),
    (["bench", QUANTISED, "--hidden", "64"], "--hidden has no effect with MODEL"),
    (["bench", QUANTISED, "--scheme", "w8a8"], "--scheme w8a8: {quantised} is quantised already"),
    (["bench", FLOAT], "{float} is a float checkpoint: add --scheme w4a8-g128 (or another)"),
    (["bench", FLOAT, "--scheme", "w8a8", "--scheme", "w4a8"], "--scheme is given more than once; a MODEL is loaded"),
    (["bench", "--scheme", "float"], "--scheme float has no effect without MODEL"),
    (["bench", QUANTISED, "--prompt", "0", "--generate", "0"], "--prompt 0 and --generate 0 leave nothing to measure"),
    (["bench", QUANTISED, "--prompt", "-1"], "argument --prompt: '-1'; whole numbers from 0 separated by commas"),
    (["bench", QUANTISED, "--batch", "1,0"], "argument --batch: '1,0'; positive numbers separated by commas"),
    (
        ["bench", QUANTISED, "--depth", "2000", "--generate", "64"],
        "--depth 2000 and --prompt 512 take 2512 positions (",
    ),
    (["bench", QUANTISED, "--json", "no/such/rows.json"], "--json no/such/rows.json: there is no folder "),
    (["bench", "--seconds", "nan"], "argument --seconds: 'nan'; a number above 0 is accepted"),
    (["demo", "--layer", "--tokens", "5"], "--tokens has no effect with --layer"),
    (["demo", "--experts", "5"], "--experts has no effect without --layer"),
    (["demo", "--scheme", "w8a8"], "--scheme has no effect without --layer"),
    (["demo", "--layer", "--experts", "5"], "--experts 5; 8 or more are accepted"),
    (["demo", "--layer", "--scheme", "w4a8-g512"], "--scheme w4a8-g512: groups of 512 do not divide"),
    *(
        ([command, *required, "--threads", number], f"argument --threads: '{number}'; a whole number from 1 to 4096")
        for command, required in (
            ("generate", ["x"]),
            ("chat", ["x"]),
            ("serve", ["x"]),
            ("quantize", ["x", "y"]),
            ("check", ["x"]),
            ("eval", ["x", "--text", "y"]),
            ("bench", []),
            ("simulate", []),
            ("demo", []),
            ("doctor", []),
        )
        for number in ("0", "-1", "4097", "two")
    ),
    (["inspect", FLOAT, "--threads", "1"], "unrecognized arguments: --threads"),
    (["plan", FLOAT, "--threads", "1"], "unrecognized arguments: --threads"),
    (["explain", "w4a8", "--threads", "1"], "unrecognized arguments: --threads"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A float and a quantised model, one without a chat template, and a text."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    plain = write_tiny_model(tmp_path_factory.mktemp("plain"))
    (plain / "chat_template.jinja").unlink()
    quantised = tmp_path_factory.mktemp("quantised") / "model"
    cpumoe.quantize_checkpoint(folder, quantised, "w4a8-g32")
    text = quantised.parent / "text.txt"
    text.write_text("#%9&" * 300)  # four tokens each time: none of the tokenizer's pairs is in it
    return {"float": str(folder), "quantised": str(quantised), "plain": str(plain), "text": str(text)}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded for what had to be refused before")

    monkeypatch.setattr("cpumoe.integrations.transformers.loading.model_loading.load_model", load_model)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code: object = cli.main(arguments)
    except SystemExit as exit:  # argparse has seen it
        code = exit.code
    told = capsys.readouterr()
    assert code == 2 and told.out == ""
    return told.err


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_refused(
    arguments: list[str], message: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal([argument.format(**places) for argument in arguments if argument], capsys)
    assert message.format(**places) in told
    last = told.splitlines()[-1]  # behind argparse's usage
    assert not any(f"{name}=" in last for name in ("scheme", "linears", "window", "stride", "experts", "hidden_size"))


def options_of(command: str) -> set[str]:
    (commands,) = (action for action in cli._parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    actions = commands.choices[command]._actions
    return {names[-1] for action in actions if (names := action.option_strings) and action.dest != "help"}


def test_the_table_has_all_commands() -> None:
    named = {module.__name__.rpartition(".")[2] for module in cli._COMMANDS}
    assert set(MEANING) == named - {"serve"}  # whose options are those of tests/cli/test_cli_serve.py


@pytest.mark.parametrize("command", MEANING)
def test_the_table_has_all_options(command: str) -> None:
    assert options_of(command) == set(MEANING[command])
    conditional = {option for option, condition in MEANING[command].items() if condition}
    tried = {word for arguments, _ in REFUSED if arguments[0] == command for word in arguments}
    assert conditional <= tried


def test_the_table_of_texts_is_right(places: dict[str, str]) -> None:
    from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer

    assert len(load_tokenizer(Path(places["float"]))(Path(places["text"]).read_text())["input_ids"]) == 1200


def test_no_prompt_on_a_terminal(
    places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, os.fdopen(master):
        monkeypatch.setattr(sys, "stdin", terminal)
        told = refusal(["generate", places["float"], "--scheme", "float"], capsys)
    assert "there is no text to continue: PROMPT, --prompt-file FILE or standard input" in told
    monkeypatch.setattr(sys, "stdin", None)  # closed: cpumoe generate MODEL <&-
    assert "there is no text to continue" in refusal(["generate", places["float"], "--scheme", "float"], capsys)


def test_threads_are_those_of_cpumoe_and_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--threads", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"]["used"] == 3
    assert torch.get_num_threads() == cpumoe.get_num_threads() == 3


def test_verbose_before_and_behind_the_command() -> None:
    def verbose(*arguments: str) -> bool:
        return bool(cli._parser().parse_args(arguments).verbose)

    for command, required in (("doctor", []), ("explain", ["w4a8"]), ("generate", ["x", "y"]), ("serve", ["x"])):
        assert verbose("-v", command, *required) and verbose(command, *required, "-v")
        assert verbose(command, "--verbose", *required) and verbose("-v", command, *required, "-v")
        assert not verbose(command, *required)


@pytest.mark.full
def test_verbose_shows_what_is_chosen(places: dict[str, str]) -> None:
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    arguments = ["generate", places["quantised"], "x", "--max-new-tokens", "1", "-v"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert "cpumoe: float parts run in" in done.stderr


@pytest.mark.parametrize("text", ["", " 1", "1_0", "1.0", "٣", "+1", "9" * 5000])
def test_whole_numbers(text: str) -> None:
    with pytest.raises(Exception, match="a whole number from 1 is accepted"):
        whole_number(1)(text)


def test_explain_still_takes_relative_folders(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKPOINTS)
    assert cli.main(["explain", "gptoss-w4a8-g32"]) == 0
    assert "chosen: native" in capsys.readouterr().out
