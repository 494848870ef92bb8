"""Checkpoints with anything changed: the result is right, or the refusal names what is wrong, and nothing else happens.

``cpumoe inspect`` and ``load_model`` see the same files and must come to the same answer. ``CPUMOE_FUZZ_EXAMPLES`` sets
how many changes are tried.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_checkpoints import CHECKPOINTS, NAMES, TENSOR_CHANGES, load_model, outcome
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_layers import relative_error
from safetensors.torch import load_file, save, save_file
from tiny_architectures import ARCHITECTURES, write_float, write_quantized

from cpumoe.errors import printable

EXAMPLES = int(os.environ.get("CPUMOE_FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize="CPUMOE_FUZZ_EXAMPLES" not in os.environ,  # the usual run tries the same changes each time
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
IDS = torch.tensor([[5, 9, 17, 3, 44, 60, 71, 8], [90, 4, 5, 100, 31, 7, 7, 77]])

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A small quantised model of every family; FOLDER-float has its weights in float, for transformers."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_quantized(write_float(root / f"source-{name}", name), root / name, "w8a8", "int-quantized")
        for name in ARCHITECTURES
    }


SOURCES = {name: CHECKPOINTS / name for name in NAMES}

WEIGHT_ONLY = {
    "w4a16-g32-asym": "pack-quantized",
    "w8a16": "pack-quantized",
    "mxfp4a16": "mxfp4-pack-quantized",
    "nvfp4a16": "nvfp4-pack-quantized",
}


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, Path]:
    """The checkpoints in tests/data, and small ones of every weight-only kind."""
    root = tmp_path_factory.mktemp("weight-only")
    source = write_float(root / "float", "qwen3_moe")
    made = {scheme: write_quantized(source, root / scheme, scheme, form) for scheme, form in WEIGHT_ONLY.items()}
    return SOURCES | made


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@cache
def logits_of_whole(folder: Path) -> torch.Tensor:
    return logits(load_model(folder))


def copied(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    return folder


# ---- config.json ---------------------------------------------------------------------------------------------------

# Fields that change what the model computes, in ways that other tests compare with transformers; here the question is
# whether both sides accept them.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**62, 10**18, 10**30, -(10**18)]),
    st.floats(),
    st.sampled_from(["", "1", "silu", "\ud800", "\x1b[31m", "x" * 300, "re:(", "\u202e"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=2))


def fields(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything inside a JSON value."""
    found = [path] if path else []
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        found += fields(value, (*path, key))
    return found


def inside(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


@FUZZ
@given(data=st.data())
def test_changes_of_config_json(models, tmp_path, data):
    name = data.draw(st.sampled_from(sorted(models)), label="checkpoint")
    config = json.loads((models[name] / "config.json").read_text())
    path = data.draw(st.sampled_from(fields(config)), label="field")
    holder = inside(config, path[:-1])
    way = data.draw(st.sampled_from(["replace", "remove", "rename", "double", "nest"]), label="way")
    text = None
    if way == "replace":
        holder[path[-1]] = data.draw(VALUES, label="value")
    elif way == "remove":
        del holder[path[-1]]
    elif way == "rename" and isinstance(holder, dict):
        holder[f"{path[-1]}_"] = holder.pop(path[-1])
    elif way == "double" and isinstance(holder, dict):
        text = json.dumps(config).replace(f'"{path[-1]}":', f'"{path[-1]}": 1, "{path[-1]}":', 1)
    else:
        holder[path[-1]] = "@"
        deep = data.draw(st.sampled_from([3, 500, 100_000]))
        text = json.dumps(config).replace('"@"', "[" * deep + "]" * deep)
    folder = copied(models[name], tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config) if text is None else text)
    model, said = outcome(folder)
    if model is None:
        assert str(folder) in said or "model.layers." in said or str(path[-1]) in said
    else:
        assert_right(model, models[name], folder, path)


def assert_right(model: torch.nn.Module, source: Path, folder: Path, path: tuple[Any, ...]) -> None:
    """The same answer as before, or the answer that transformers gives with the float weights and that config.json."""
    got, problem = answer(model)
    before = logits_of_whole(source)
    if got is not None and got.shape == before.shape and relative_error(got, before) < 0.01:
        return
    # Without input_activations the same weights are those of a weight-only scheme.
    changed_activations = path[-1] == "input_activations"
    assert path[0] != "quantization_config" or changed_activations, "which weights are quantised is no matter of taste"
    twin = copied(source.with_name(f"{source.name}-float"), folder.with_name("twin"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        twin, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    expected, stock_problem = answer(stock)
    if got is None or expected is None:
        assert got is expected, f"{problem!r}; transformers: {stock_problem!r}"
        return
    assert torch.equal(torch.isfinite(got), torch.isfinite(expected))
    # Of few tokens some are given to other experts when activations are rounded; the best of them tell.
    size = expected.nan_to_num(0, 0, 0).norm(dim=-1).clamp_min(1e-6)
    error = (got - expected).nan_to_num(0, 0, 0).norm(dim=-1) / size
    assert float(error.min()) < 0.1, error


def answer(model: torch.nn.Module) -> tuple[torch.Tensor | None, Exception | None]:
    """Logits, or why there are none: some configurations cannot be computed by anyone."""
    try:
        return logits(model), None
    except Exception as problem:
        return None, problem


# ---- tensors -------------------------------------------------------------------------------------------------------


@FUZZ
@given(data=st.data())
def test_changes_of_tensors(sources, tmp_path, data):
    source = sources[data.draw(st.sampled_from(sorted(sources)), label="checkpoint")]
    held = load_file(source / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(held)), label="tensor")
    way = data.draw(st.sampled_from(sorted(TENSOR_CHANGES)), label="way")
    assume(way != "not finite" or held[name].is_floating_point())
    assume(way != "of one dimension more" or held[name].dim() > 0)
    assume(way != "not finite" or not name.endswith("_scale"))  # values are not looked at by inspect
    # PyTorch's attention makes numbers of scores that are none.
    assume(way != "not finite" or not name.endswith(("q_norm.weight", "k_norm.weight")))
    before = copy.copy(held)
    TENSOR_CHANGES[way](held, name)
    folder = copied(source, tmp_path / "model")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    model, said = outcome(folder)
    if model is None:
        touched = [n for n in {*held, *before} if held.get(n) is not before.get(n)]
        words = [part for n in touched for part in (n[:100], n.rpartition(".")[0])]
        # transformers renames what it knows, and says the new name of what it did not expect.
        words += [part.replace("block_sparse_moe", "mlp") for n in touched for part in n.split("experts")[:1]]
        assert any(printable(word) in said for word in words), (touched, said)
    elif way == "not finite":
        assert not torch.isfinite(logits(model)).all()
    else:
        assert relative_error(logits(model), logits_of_whole(source)) < 0.01


@FUZZ
@given(data=st.data())
def test_changes_of_bytes(tmp_path, data):
    """A file that was cut or whose header has other bytes. (The values of weights have no checksum.)"""
    source = SOURCES[data.draw(st.sampled_from(NAMES), label="checkpoint")]
    content = bytearray((source / "model.safetensors").read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    way = data.draw(st.sampled_from(["cut", "header", "grown"]), label="way")
    if way == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif way == "grown":
        content += b"\0" * data.draw(st.integers(1, 100))
    else:
        place = data.draw(st.one_of(st.integers(0, 11), st.integers(0, header - 1)))
        content[place] = data.draw(st.one_of(st.sampled_from(b'"{}[],:0129 \x1b\xff'), st.integers(0, 255)))
    folder = copied(source, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    model, said = outcome(folder)
    if model is None:
        assert str(folder) in said
    else:
        assert relative_error(logits(model), logits_of_whole(source)) < 0.01


def test_a_tensor_that_is_twice_in_a_header_is_refused(tmp_path):
    """safetensors takes the last of the two."""
    held = {"a": torch.ones(2), "b": torch.zeros(2)}
    content = save(held)
    folder = copied(SOURCES[NAMES[0]], tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content.replace(b'"b"', b'"a"'))
    model, said = outcome(folder)
    assert model is None and "model.safetensors" in said
