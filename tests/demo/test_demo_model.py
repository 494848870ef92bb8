"""The model that comes with the package: an ordinary checkpoint, small, and as good as its float original."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cpumoe
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import random_routing
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import experts_of
from cpumoe.cli import main
from cpumoe.demo import model as demo_model
from cpumoe.evaluation.perplexity import perplexity
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.scheme import Scheme
from cpumoe.quantization.quantization_plan import QuantizationPlan

DATA = Path(__file__).parents[1] / "data"
ORIGINAL = DATA / "python-stdlib"  # the float model's configuration, and its loss on a part of heldout.txt


@pytest.fixture(scope="module")
def model():
    return cpumoe.load_model(demo_model.FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model.FOLDER)


def test_it_is_small_and_whole():
    assert sum(path.stat().st_size for path in demo_model.FOLDER.iterdir()) <= 16_000_000
    with Checkpoint.open(demo_model.FOLDER) as checkpoint:
        sources = experts_of(checkpoint, describe(checkpoint))
    assert {str(source.config.scheme) for source in sources.values()} == {"w4a8-g128"}
    assert len(sources) == 7


def test_its_config_is_what_the_quantiser_writes(tmp_path):
    """Tensors stay as they are, since they are calibrated; what is said of them is said as for any other model."""
    shipped = json.loads((demo_model.FOLDER / "config.json").read_text())
    original = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ORIGINAL), dtype=torch.bfloat16)
    original.save_pretrained(tmp_path)
    shutil.copy(ORIGINAL / "config.json", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        scheme = Scheme.parse("w4a8-g128")
        plan = QuantizationPlan(checkpoint, describe(checkpoint), scheme, scheme, "pack-quantized")
        assert shipped == dict(checkpoint.config) | {"quantization_config": plan.quantization_config()}
    assert "lm_head" in shipped["quantization_config"]["ignore"]


def test_it_loses_little_against_its_float_original(model, tokenizer):
    measured = json.loads((ORIGINAL / "measured.json").read_text())
    found = perplexity(model, tokenizer, (DATA / "heldout.txt").read_text()[:12_000])
    assert (found.tokens, found.bytes) == (measured["tokens"], measured["bytes"])
    assert found.bits_per_byte < 1.0  # it has learned Python
    assert abs(found.nats / measured["nats"] - 1) < 0.01


def test_it_writes_python(model, tokenizer):
    prompt = tokenizer("import os\nimport sys\n\n\ndef main(argv=None):\n", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    assert text.startswith("    ") and "argv" in text


def test_the_load_of_its_experts_is_for_any_number_of_them():
    for experts in (8, 16, 128):
        load = demo_model.measured_load(experts)
        assert load.shape == (experts,) and abs(float(load.sum()) - 1) < 1e-5 and bool((load > 0).all())
    own = torch.tensor(demo_model.quality()["expert_load"]["model.layers.0.mlp.experts"], dtype=torch.float32)
    assert len(own) == 16 and bool((own > 0).all())


def test_bench_takes_its_routing(monkeypatch, tmp_path):
    seen = []

    def bench_shape(shape, *_):
        seen.append(shape.load)
        return []

    monkeypatch.setattr("cpumoe.cli.bench_layers.bench_shape", bench_shape)
    with pytest.raises(ValueError):  # there are no rows to report
        from cpumoe.cli import bench

        parser = argparse.ArgumentParser()
        bench.add_command(parser.add_subparsers())
        arguments = parser.parse_args(["bench", "--routing", "demo"])
        bench.run(arguments)
    assert len(seen) == 1 and torch.allclose(torch.tensor(seen[0]), demo_model.measured_load(128))


def test_routing_follows_the_load():
    load = demo_model.measured_load(32)
    shape = Shape("shape", 64, 64, 32, 2, load=tuple(load.tolist()))
    ids, _ = random_routing(shape, 20_000, 0)
    share = torch.bincount(ids.flatten(), minlength=32) / ids.numel()
    assert float((share - load).abs().max()) < 0.01


@pytest.mark.full
def test_demo_command(capsys):
    assert main(["demo", "--tokens", "8"]) == 0
    said = capsys.readouterr().out
    for part in ("tokens per second", "experts were used", "Where a token's", "transformers alone", "bits per byte"):
        assert part in said
    assert main(["demo", "--tokens", "1"]) == 2
