"""``cpumoe bench MODEL``: rates of a whole model, and the bytes that its share of DRAM is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import run_command
from tiny_models import write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe.bench.model_rates import ModelRow, StepBytes, Workload, cache_bytes, list_tests, measure_model

SHIPPED = Path(cpumoe.__file__).parent / "data" / "python-stdlib-w4a8-g128"


def test_the_command_measures_every_combination(tmp_path: Path) -> None:
    sizes = ["--prompt", "5,3", "--generate", "2", "--depth", "0,4", "--batch", "1,2", "--repetitions", "3"]
    done = run_command("bench", str(SHIPPED), *sizes, "--threads", "1", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["model"] == str(SHIPPED) and found["model_bytes"] > 1e7
    rows = found["tests"]
    assert [(row["test"], row["batch"]) for row in rows] == [
        (f"{name}{depth}", batch) for name in ("pp5", "pp3", "tg2") for depth in ("", " @ d4") for batch in (1, 2)
    ]
    for row in rows:
        assert len(row["tokens_per_second_samples"]) == 3 and row["threads"] == 1 and row["isa"] == cpumoe.isa()
        assert row["tokens_per_second"] == sorted(row["tokens_per_second_samples"])[1]
        assert row["tokens_per_second_stdev"] > 0 and row["dram_gbps"] > 0 and not row["from_memory"]
        assert (row["dram_fraction"] is None) == (row["kind"] == "prefill") == (row["step_bytes"] is None)
    table = done.stdout.splitlines()
    assert [line.split()[0] for line in table[2:15:6]] == ["test", "pp3", "tg2"]
    assert "so small that it may stay in a cache" in done.stdout


@pytest.mark.parametrize(("architecture", "kv_cache"), [("qwen3_moe", None), ("qwen3_moe", "int8"), ("gpt_oss", None)])
def test_a_step_must_read_the_chosen_experts_the_other_weights_and_the_cache(
    tmp_path: Path, architecture: str, kv_cache: str | None
) -> None:
    write_tiny_model(tmp_path, architecture)
    model = cpumoe.load_model(tmp_path, scheme="w4a8-g32", kv_cache=kv_cache)
    (row,) = measure_model(model, [Workload("decode", 8, depth=12)], 1)
    experts = [module for module in model.modules() if isinstance(module, cpumoe.Experts)]
    read = row.step_bytes
    assert read is not None and row.dram_share is not None
    packed = sum(module.packed_bytes for module in experts)
    assert read.experts == pytest.approx(packed * 2 / 4, rel=0.05)  # two of four experts, and what all of them share
    embedding = model.get_input_embeddings().weight
    every = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    own = sum(tensor.nbytes for module in experts for tensor in (*module.parameters(), *module.buffers()))
    assert read.other_weights == every - own - embedding.nbytes
    tokens, heads, depth = 12 + 8 / 2, 2, 16
    head_bytes = depth * embedding.itemsize if kv_cache is None else depth + 4
    full = 2 * heads * head_bytes * tokens
    # gpt-oss sees 16 tokens in every other layer; a step leaves 15 of them for the next one.
    seen = [full, full] if architecture == "qwen3_moe" else [full, full * 15 / 16]
    assert read.cache == pytest.approx(sum(seen))
    assert row.dram_share == pytest.approx(row.rate * read.total / row.dram)


def test_a_head_that_is_the_embedding_is_read_whole(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=True)
    model = cpumoe.load_model(tmp_path, scheme="w4a8-g32")
    (row,) = measure_model(model, [Workload("decode", 1)], 1)
    experts = [module for module in model.modules() if isinstance(module, cpumoe.Experts)]
    every = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    own = sum(tensor.nbytes for module in experts for tensor in (*module.parameters(), *module.buffers()))
    assert row.step_bytes is not None and row.step_bytes.other_weights == every - own


def test_layers_with_states_count_them_whole(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_next")
    model = cpumoe.load_model(tmp_path, scheme="w4a8-g32")
    short, long = measure_model(model, [Workload("decode", 2), Workload("decode", 2, depth=32)], 1)
    assert short.step_bytes is not None and long.step_bytes is not None
    caches = []
    for tokens in (1, 33):
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
        caches.append(cache_bytes(cache))
    assert [short.step_bytes.cache, long.step_bytes.cache] == caches


def test_a_context_that_the_counted_steps_would_leave(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=64)
    sizes = ["--prompt", "0", "--depth", "0", "--repetitions", "1", "--scheme", "w4a8-g32"]
    refused = run_command("bench", str(tmp_path), *sizes, "--generate", "63")
    assert "--generate 63 take 65 positions (with the steps whose experts are counted)" in refused.stderr
    assert run_command("bench", str(tmp_path), *sizes, "--generate", "62").returncode == 0


def test_rates() -> None:
    row = ModelRow(Workload("decode", 4, batch=2), (10.0, 40.0, 20.0), 2, "avx2", 1e3, StepBytes(30.0, 15.0, 5.0), True)
    assert (row.rate, row.dram_share) == (20.0, 0.5)  # ten steps of 50 bytes a second
    assert row.spread == pytest.approx(15.275, abs=1e-3)
    assert [test.name for test in list_tests([0, 3], [0], [0, 7], [1])] == ["pp3", "pp3 @ d7"]


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    model = cpumoe.load_model(tmp_path, scheme="w4a8-g32")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits that are not finite"):
        list(measure_model(model, [Workload("prefill", 4)], 1))
