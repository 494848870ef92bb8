"""``cpumoe eval`` on a small checkpoint that the test makes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tiny_text_model import EXPERTS, POSITIONS, TEXT, tiny_model, tiny_tokenizer

from cpumoe import cpu
from cpumoe.cli import main
from cpumoe.evaluation.perplexity import Evaluation, perplexity


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def float_perplexity(folder: Path, **options: int) -> Evaluation:
    """Without cpumoe's loader, but in the dtype that it takes on this machine."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=cpu.float_dtype()[0])
    return perplexity(model, tiny_tokenizer(), TEXT, **options)


def test_perplexity_of_a_float_model(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = float_perplexity(folder)
    assert main(["eval", str(folder), "--text", str(text), "--scheme", "float", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert (told["tokens"], told["bytes"]) == (expected.tokens, len(TEXT.encode()))
    assert (told["window"], told["stride"]) == (POSITIONS, POSITIONS // 2)
    assert "comparison" not in told and "expert_load" not in told


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_for_terminals(
    folder: Path, text: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["eval", str(folder), "--text", str(text), "--scheme", "float", "--json"]) == 0
    out, err = capsys.readouterr()
    assert ("Evaluating: 100%" in err) == terminal
    json.loads(out)


def test_report_of_a_quantised_model(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "load.png"
    arguments = ["eval", str(folder), "--text", str(text), "--scheme", "w4a8-g32", "--against", str(folder)]
    arguments += ["--experts", "--heatmap", str(picture), "--window", "32", "--stride", "16"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    for words in ("perplexity", "bits per byte", "KL divergence", "same top token", "same experts", "never used"):
        assert words in report
    assert "windows of 32, stride 16" in report and "model.layers.1.mlp.experts" in report
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    comparison = told["comparison"]
    expected = float_perplexity(folder, window=32, stride=16)
    assert comparison["float_model"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert comparison["model"]["perplexity"] == told["perplexity"]
    assert 0 < comparison["kl"] < 2 and 0.3 < comparison["top1_agreement"] <= 1
    assert [agreement["layer"] for agreement in comparison["routing"]] == [
        f"model.layers.{i}.mlp.experts" for i in range(2)
    ]
    assert all(0.3 < agreement["shared"] <= 1 for agreement in comparison["routing"])
    for layer in told["expert_load"]["layers"]:
        # The float model runs too, but only the load of the quantised one is counted.
        assert len(layer["counts"]) == EXPERTS and sum(layer["counts"]) == 2 * layer["tokens"]
        assert layer["tokens"] >= told["tokens"]


def test_the_perplexity_of_a_model_is_one_number(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watching experts makes a model run layer by layer, which rounds in other places than the native decoder."""
    monkeypatch.delenv("CPUMOE_STEPS", raising=False)
    found = []
    for options in ([], ["--experts"], ["--against", str(folder)], ["--against", str(folder), "--experts"]):
        arguments = ["eval", str(folder), "--text", str(text), "--scheme", "w4a8-g32", "--json"]
        assert main([*arguments, *options]) == 0
        told = json.loads(capsys.readouterr().out)
        found.append(told["nats"])
        if "--experts" in options:
            assert all(layer["tokens"] >= told["tokens"] for layer in told["expert_load"]["layers"])
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    assert main(arguments) == 0
    by_layers = json.loads(capsys.readouterr().out)["nats"]
    # PyTorch's sums may differ in the last bit with the alignment of what they add.
    assert found[1:] == [pytest.approx(found[0], rel=1e-12)] * 3
    assert by_layers != pytest.approx(found[0], rel=1e-9)  # else this test would prove nothing


def test_against_itself(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", str(folder), "--text", str(text), "--scheme", "float", "--against", str(folder), "--json"]
    assert main([*arguments, "--limit", "50"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["comparison"]["kl"] == 0 and told["comparison"]["top1_agreement"] == 1
    assert told["bytes"] == len(TEXT[:50].encode())


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    return told.err


def test_refusals(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder)
    missing, latin, empty = tmp_path / "missing.txt", tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    empty.write_text(" \n")
    assert f"{missing}: there is no such file" in refusal(capsys, model, "--text", str(missing))
    assert f"{latin} is not UTF-8: invalid continuation byte at byte 3" in refusal(capsys, model, "--text", str(latin))
    assert f"{empty}: there is no text in it" in refusal(capsys, model, "--text", str(empty))
    assert "there is no such file" in refusal(capsys, model, "--text", str(tmp_path))
    given = ["--text", str(text)]
    assert "the text has 1 tokens" in refusal(capsys, model, *given, "--scheme", "float", "--limit", "1")
    assert "/nowhere: there is no such folder" in refusal(capsys, "/nowhere", *given)
    assert "/nowhere: there is no such folder" in refusal(capsys, model, *given, "--against", "/nowhere")
    assert "there is no folder /nowhere" in refusal(capsys, model, *given, "--heatmap", "/nowhere/load.png")
    assert "this is a folder" in refusal(capsys, model, *given, "--heatmap", str(tmp_path))


def test_refuses_a_quantised_model_to_compare_with(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = tmp_path / "quantised"
    shutil.copytree(folder, quantised)
    config = json.loads((quantised / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (quantised / "config.json").write_text(json.dumps(config))
    given = [str(folder), "--text", str(text), "--scheme", "float", "--against", str(quantised)]
    assert f"--against {quantised}: this is quantised; a float model is accepted" in refusal(capsys, *given)


def test_refuses_a_folder_without_a_tokenizer(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "tokenizer.json").write_text("{}")
    given = ["--text", str(text), "--scheme", "float"]
    assert f"{copy}: the tokenizer cannot be read" in refusal(capsys, str(copy), *given)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert f"{copy}: there is no tokenizer (tokenizer.json, " in refusal(capsys, str(copy), *given)


@pytest.mark.parametrize(("module", "extra"), [("matplotlib", "bench"), ("transformers", "transformers")])
def test_names_the_extra_to_install(
    folder: Path,
    text: Path,
    module: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    told = refusal(capsys, str(folder), "--text", str(text), "--heatmap", "load.png", "--scheme", "float")
    assert f"needs {module}: pip install 'cpumoe[{extra}]'" in told
