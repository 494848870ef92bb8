"""Quantising checkpoints on disk: what is written, that the numbers are right, that nothing half-done looks whole."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling import first_of, sampled_product
from tiny_architectures import ARCHITECTURES, write_float
from tiny_models import write_tiny_model, write_tiny_tokenizer

import cpumoe
from cpumoe import CheckpointError, UnsupportedScheme
from cpumoe.checkpoints import tensor_file
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import Buffers
from cpumoe.checkpoints.loading import experts_of
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.cli import main
from cpumoe.integrations.transformers.calibration import calibration
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers import reference
from cpumoe.layers.rounding import quantize_weight
from cpumoe.option_values import INTEGER_FORMATS
from cpumoe.quantization.calibration_text import read_sequences
from cpumoe.quantization.layer_writer import LayerWriter


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("float") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The experts that a token does not choose cost it nothing. " * 200)
    return path


def all_tensors(folder):
    return {k: t for path in sorted(folder.glob("*.safetensors")) for k, t in load_file(path).items()}


def same(one, other):
    """Whether two quantised weights are the same but for their biases."""
    parts = ((one.values, other.values), (one.scales, other.scales), (one.zero_points, other.zero_points))
    for mine, theirs in (*parts, (one.factors, other.factors)):
        if mine is None or theirs is None:
            assert mine is theirs
        elif not torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            return False
    return one.element == other.element


WRITTEN = [
    *(("w4a8-g32", form) for form in INTEGER_FORMATS),
    *((scheme, None) for scheme in ("w8a8-g32", "w4a16-g32", "w8a16", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16")),
]


@pytest.mark.parametrize(("scheme", "form", "architecture"), sampled_product(WRITTEN, list(ARCHITECTURES)))
def test_every_architecture_is_quantised_and_loads(tmp_path, architecture, scheme, form):
    source = write_float(tmp_path / "float", architecture, dtype=torch.bfloat16)
    report = cpumoe.quantize_checkpoint(source, tmp_path / "q", scheme, **({} if form is None else {"format": form}))
    assert report.matrices > 0 and report.calibrated == 0
    with Checkpoint.open(source) as plain, Checkpoint.open(tmp_path / "q") as quantized:
        floats, integers = (
            experts_of(plain, describe(plain), cpumoe.Scheme.parse(scheme)),
            experts_of(quantized, describe(quantized)),
        )
        assert floats.keys() == integers.keys()
        for name, source_of_floats in floats.items():
            gate_up, down, *biases = source_of_floats.read_float(0, source_of_floats.config.experts, Buffers())
            read = integers[name].read(0, source_of_floats.config.experts, Buffers()).plain()
            assert str(integers[name].config.scheme) == scheme
            for weight, stored in ((gate_up, read.gate_up), (down, read.down)):
                assert same(stored, quantize_weight(weight, cpumoe.Scheme.parse(scheme), clip_search=True))
            for bias, stored in zip(biases, (read.gate_up.bias, read.down.bias), strict=True):
                assert (bias is None) == (stored is None)
                assert bias is None or torch.equal(bias.float(), stored.float())
    model = cpumoe.load_model(tmp_path / "q", dtype=torch.float32)
    assert torch.isfinite(model(torch.randint(0, 128, (2, 9))).logits).all()


def test_what_is_not_quantised_is_copied_to_the_bit(float_model, tmp_path):
    cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    before, after = all_tensors(float_model), all_tensors(tmp_path / "q")
    kept = [name for name in after if name in before]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} <= set(kept)
    assert all(torch.equal(before[name], after[name]) for name in kept)
    left = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(left)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "q" / name).read_bytes() == (float_model / name).read_bytes()


def test_copied_tensors_are_never_in_memory_whole(tmp_path, monkeypatch):
    """Tensors that belong to no module of the model may be of any size."""
    others = {"mtp.layers.0.proj.weight": torch.randn(37, 301), "mtp.empty": torch.empty(0, 4)}
    others |= {"mtp.norm.weight": torch.randn(3, 1000).to(torch.bfloat16)}
    source = write_tiny_model(tmp_path / "float", "qwen3_next")
    tensors = all_tensors(source) | others
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    sizes = []

    def read_into(self, name, out, first_byte=0):
        sizes.append(out.nbytes if name in others or name.endswith("norm.weight") else 0)
        return plain(self, name, out, first_byte)

    plain = TensorFile.read_into
    monkeypatch.setattr(TensorFile, "read_into", read_into)
    monkeypatch.setattr(tensor_file, "_COPIED_BYTES", 1000)
    cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    written = all_tensors(tmp_path / "q")
    assert all(torch.equal(written[name], tensor) for name, tensor in others.items())
    assert max(sizes) == 1000


@pytest.mark.parametrize("linears", ["float", "w8a8"])
def test_linears_have_a_scheme_of_their_own(float_model, tmp_path, linears):
    cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", linears=linears)
    model = cpumoe.load_model(tmp_path / "q", dtype=torch.float32)
    projection = model.model.layers[0].self_attn.q_proj
    assert type(projection) is torch.nn.Linear if linears == "float" else str(projection.scheme) == linears
    assert str(model.model.layers[0].mlp.experts.config.scheme) == "w4a8-g32"


# ---- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_calibrated(tmp_path, text, architecture):
    source = write_float(tmp_path / "float", architecture, vocab_size=300)
    write_tiny_tokenizer(source)
    report = cpumoe.quantize_checkpoint(
        source, tmp_path / "q", "w4a8-g32", calibration=text, calibration_samples=24, calibration_length=64
    )
    assert report.tokens == 24 * 64 and 0 < report.calibrated <= report.matrices
    told = json.loads((tmp_path / "q/quantization_report.json").read_text())
    assert told == report.to_json()
    model = cpumoe.load_model(tmp_path / "q", dtype=torch.float32)
    assert torch.isfinite(model(torch.randint(0, 128, (1, 9))).logits).all()


def test_calibration_runs_the_model_that_is_on_disk(float_model, tmp_path, text, monkeypatch):
    """With nothing rounded, what goes from layer to layer is what transformers computes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def exact(self, weight, statistics, scheme, name):
        self._counts["matrices"] += 1
        kept[name.removesuffix(".weight")] = weight.clone()
        return quantize_weight(weight, scheme, name)

    kept = {}
    monkeypatch.setattr(LayerWriter, "_quantized", exact)
    monkeypatch.setattr(reference, "dequantize", lambda weight: kept[list(kept)[-1]].float())
    results = []
    monkeypatch.setattr(calibration._Run, "_write_state", lambda self, index, hidden, _: results.append(hidden))
    cpumoe.quantize_checkpoint(
        float_model, tmp_path / "q", "w4a8-g32", calibration=text, calibration_samples=3, calibration_length=40
    )
    ids = read_sequences(text, AutoTokenizer.from_pretrained(float_model), 3, 40)
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(results[0], expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.model.norm(results[1]), expected[2], rtol=1e-4, atol=1e-4)


def test_experts_that_saw_few_tokens_are_named_and_rounded(float_model, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("The experts")
    report = cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", calibration=few)
    assert report.calibrated == 0
    assert report.uncovered == {f"model.layers.{i}.mlp.experts": [0, 1, 2, 3] for i in (0, 1)}
    cpumoe.quantize_checkpoint(float_model, tmp_path / "plain", "w4a8-g32")
    calibrated, plain = all_tensors(tmp_path / "q"), all_tensors(tmp_path / "plain")
    assert all(torch.equal(calibrated[name], plain[name]) for name in plain)


# ---- unfinished work -----------------------------------------------------------------------------------------------

_RUN = "import sys, cpumoe; cpumoe.quantize_checkpoint(*sys.argv[1:4], **eval(sys.argv[4]))"

# Stops in the second layer, with some of its tensors written, and waits to be killed.
_RUN_AND_WAIT = """
import time
from cpumoe.quantization.layer_writer import LayerWriter
quantize_expert = LayerWriter.quantize_expert
def wait_in_second_layer(self, source, expert, *inputs):
    if self._layer.index == 1 and expert == 2:
        self._writer._file.flush()
        print("waiting", flush=True)
        time.sleep(600)
    return quantize_expert(self, source, expert, *inputs)
LayerWriter.quantize_expert = wait_in_second_layer
"""


def start(*arguments, code=_RUN, **options):
    command = [sys.executable, "-c", code, *map(str, arguments), repr(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("calibrated", first_of([False, True], 1))
def test_a_killed_run_is_taken_up_where_it_was(tmp_path, text, calibrated):
    source = write_tiny_model(tmp_path / "float")
    options = {"calibration": str(text), "calibration_samples": 8, "calibration_length": 64} if calibrated else {}
    whole = tmp_path / "whole"
    cpumoe.quantize_checkpoint(source, whole, "w4a8-g32", **options)
    process = start(source, tmp_path / "q", "w4a8-g32", code=_RUN_AND_WAIT + _RUN, **options)
    assert process.stdout.readline() == "waiting\n"
    process.kill()
    process.communicate()
    work = tmp_path / "q.partial"
    first_layer = work / "model-00002-of-00003.safetensors"
    assert list(work.glob("model-00003*.partial")) and not (tmp_path / "q").exists()
    assert not (work / "config.json").exists()
    with pytest.raises(CheckpointError):
        cpumoe.load_model(work)
    stamp = first_layer.stat().st_mtime_ns
    cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32", **options)
    assert (tmp_path / "q" / first_layer.name).stat().st_mtime_ns == stamp, "the finished layer was done again"
    one, other = all_tensors(whole), all_tensors(tmp_path / "q")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(p.name for p in whole.iterdir()) == sorted(p.name for p in (tmp_path / "q").iterdir())
    for name in ("config.json", "quantization_report.json", "model.safetensors.index.json"):
        assert (whole / name).read_text() == (tmp_path / "q" / name).read_text()


def test_a_run_that_was_killed_at_its_very_end_is_taken_up(float_model, tmp_path, monkeypatch):
    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("cpumoe.quantization.checkpoint_quantizer.sync", lambda path: None)
        patched.setattr("cpumoe.quantization.checkpoint_quantizer._finish", lambda *_: killed(None, None))
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    report = cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    assert report.matrices == 24 and not list((tmp_path / "q").rglob(".work"))


def test_work_of_other_settings_is_not_mixed_in(float_model, tmp_path):
    work = tmp_path / "q.partial"
    (work / ".work").mkdir(parents=True)
    (work / ".work/settings.json").write_text('{"scheme": "w8a8"}')
    with pytest.raises(RuntimeError, match=r"settings: .*scheme \(w8a8 there, w4a8-g32 now\).*rm -r .*q\.partial"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    (work / ".work/settings.json").write_text("{")
    with pytest.raises(RuntimeError, match=r"settings.json is damaged; .*rm -r .*q\.partial"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")


def test_a_run_that_was_stopped_while_it_cleared_up_is_finished(float_model, tmp_path, monkeypatch):
    def stopped(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("cpumoe.quantization.checkpoint_quantizer.clear_notes", stopped)
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    notes = sorted((tmp_path / "q/.work").iterdir())
    with pytest.raises(FileExistsError):  # of another run: nothing is touched
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w8a8")
    assert sorted((tmp_path / "q/.work").iterdir()) == notes
    report = cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    assert report.matrices == 24 and not (tmp_path / "q/.work").exists()


@pytest.mark.full
def test_two_processes_do_not_write_the_same_folder(float_model, tmp_path):
    work = tmp_path / "q.partial"
    (work / ".work").mkdir(parents=True)
    with (work / ".work/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(float_model, tmp_path / "q", "w4a8-g32")
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "another process is writing" in errors
    cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")  # the lock went with its owner


def test_a_full_disk_leaves_nothing_that_looks_whole(float_model, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code = "import sys; from cpumoe.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "quantize", float_model, tmp_path / "q", "--scheme", "w4a8-g32"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2 and "too large" in done.stderr.lower()
    assert str(tmp_path / "q.partial" / "model-0000") in done.stderr, "the file is named"
    assert not (tmp_path / "q").exists()
    assert not list((tmp_path / "q.partial").rglob("*.partial"))
    cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")  # with room, it goes on


@pytest.mark.full
def test_memory_stays_below_two_layers(tmp_path):
    """The bound that the documentation states, on a model whose layers are large beside the interpreter."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 6}
    source = write_float(tmp_path / "float", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    code = (
        "import sys, torch, cpumoe\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "def memory(key):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith(key))\n"
        "import cpumoe.integrations.transformers.layout.model_description, transformers\n"
        "transformers.Qwen3MoeForCausalLM, cpumoe.quantize_checkpoint\n"
        "before = memory('VmRSS')\n"
        "cpumoe.quantize_checkpoint(sys.argv[1], sys.argv[2], 'w4a8-g32')\n"
        "print(memory('VmHWM') - before)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "q"], check=True, capture_output=True, text=True
    ).stdout
    layer = 64 * 3 * 512 * 256 * 2
    assert int(out) * 1024 < 2 * layer


# ---- a source that does not stay as it is --------------------------------------------------------------------------


def overwritten(path, what=b"<"):
    """Puts other numbers into a weight file, with its old size and times."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-200_000, os.SEEK_END)
        file.write(what * 51_200)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(path):
    """As a download does it: another file takes the name."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-4] + b"abcd")
    other.replace(path)


CHANGES = {
    "model.safetensors": [
        overwritten,
        partial(overwritten, what=b"\xff"),  # NaN: refused as such otherwise
        replaced,
        lambda path: path.unlink(),
    ],
    "tokenizer.json": [lambda path: path.write_text(path.read_text() + " "), lambda path: path.unlink()],
    "config.json": [lambda path: path.write_text(path.read_text() + " ")],
}


@pytest.mark.parametrize("name,change", [(name, change) for name, changes in CHANGES.items() for change in changes])
@pytest.mark.parametrize("layer,expert", [(0, 0), (1, 3)])
def test_a_source_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch, name, change, layer, expert):
    source = write_tiny_model(tmp_path / "float")
    quantize_expert = LayerWriter.quantize_expert

    def meanwhile(self, experts, number, *inputs):
        if (self._layer.index, number) == (layer, expert) and not changed:
            changed.append(change(source / name))
        return quantize_expert(self, experts, number, *inputs)

    changed = []
    monkeypatch.setattr(LayerWriter, "quantize_expert", meanwhile)
    with pytest.raises(CheckpointError, match=f"{name}.*rm -r .*q.partial"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    assert not (tmp_path / "q").exists()
    # the layer in which it happened has no file under its name
    assert not (tmp_path / "q.partial" / f"model-0000{layer + 2}-of-00003.safetensors").exists()
    if not (source / "model.safetensors").exists():
        return
    with pytest.raises(RuntimeError, match=r"source has changed since; .*rm -r .*q\.partial"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    shutil.rmtree(tmp_path / "q.partial")  # what it says
    if not isinstance(change, partial):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
        cpumoe.load_model(tmp_path / "q")


def test_a_tokenizer_that_changes_at_the_very_end_is_noticed(tmp_path, monkeypatch):
    source = write_tiny_model(tmp_path / "float")

    def copy_and_change(path, copy):
        shutil.copyfile(path, copy)
        if path.name == "tokenizer.json":
            path.write_text(path.read_text() + " ")

    monkeypatch.setattr("cpumoe.quantization.checkpoint_quantizer.copy_durably", copy_and_change)
    with pytest.raises(CheckpointError, match="tokenizer.json changed"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    assert not (tmp_path / "q").exists() and not (tmp_path / "q.partial/config.json").exists()


def test_a_source_that_changes_while_it_is_opened_is_noticed(tmp_path, monkeypatch):
    source = write_tiny_model(tmp_path / "float")
    opened = Checkpoint.open

    def slowly(folder):
        checkpoint = opened(folder)
        replaced(source / "model.safetensors")  # now the open file is not the one of that name
        return checkpoint

    monkeypatch.setattr(Checkpoint, "open", slowly)
    with pytest.raises(CheckpointError, match="model.safetensors changed while it was being opened"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    assert not (tmp_path / "q.partial").exists()


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(float_model, tmp_path):
    with pytest.raises(FileExistsError, match="exists already"):
        cpumoe.quantize_checkpoint(float_model, tmp_path, "w4a8-g32")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "a/b", "w4a8-g32")
    (tmp_path / "link").symlink_to(float_model)
    before = sorted(float_model.iterdir())
    for inside in (
        float_model / "x",
        float_model / "x/y",
        tmp_path / "link/x",
        float_model / "../" / float_model.name / "x",
    ):
        with pytest.raises(ValueError, match="dst=.* is inside of src=.*; name a folder next to it, such as"):
            cpumoe.quantize_checkpoint(float_model, inside, "w4a8-g32")
    (tmp_path / "link").unlink()
    assert sorted(float_model.iterdir()) == before
    with pytest.raises(ValueError, match="pack-quantized"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", format="zip")
    with pytest.raises(UnsupportedScheme, match="group_size=128 does not divide"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g128")
    cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32")
    with pytest.raises(UnsupportedScheme, match="quantised already.*cpumoe quantize FLOAT_MODEL"):
        cpumoe.quantize_checkpoint(tmp_path / "q", tmp_path / "again", "w4a8-g32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]


def test_missing_tensors_stop_it_before_it_starts(float_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in float_model.glob("*.json"):
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = all_tensors(float_model)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.experts.3.up_proj.weight"):
        cpumoe.quantize_checkpoint(broken, tmp_path / "q", "w4a8-g32")
    assert not (tmp_path / "q.partial").exists()


def test_command_line(float_model, tmp_path, text, capsys):
    arguments = ["quantize", str(float_model), str(tmp_path / "q"), "--scheme", "w4a8-g32"]
    calibrated = ["--calibration", str(text), "--calibration-samples", "4", "--calibration-length", "64"]
    assert main([*arguments, *calibrated]) == 0
    said = capsys.readouterr()
    assert "matrices" in said.out and "calibrated with 256 tokens" in said.out
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    arguments[2] = str(tmp_path / "r")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated_matrices"] == 0
    assert Path(tmp_path / "r/config.json").exists()


def test_activations_on_request_are_not_part_of_a_checkpoint(float_model, tmp_path):
    with pytest.raises(cpumoe.UnsupportedScheme, match=r"w4a16-g32\+int8: .* leave out \+int8 here"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a16-g32+int8")
    with pytest.raises(cpumoe.UnsupportedScheme, match=r"w8a16\+int8"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a16-g32", linears="w8a16+int8")


@pytest.mark.parametrize("scheme", ["mxfp4a16", "nvfp4a16", "w4a16-g32-asym"])
def test_calibration_without_effect_is_refused(float_model, tmp_path, scheme):
    with pytest.raises(cpumoe.UnsupportedScheme, match=f"calibration has no effect on {scheme}"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", scheme, calibration=tmp_path / "text.txt")
