"""Checkpoints that we write, read by others: transformers in a process without cpumoe, compressed-tensors by itself.

transformers 5.22 reads pack-quantized experts of every architecture but gpt-oss, for which it knows fused files only
and makes up the experts at random. It does not load int-quantized experts, and says so. For these, compressed-tensors'
own decompressors are asked. Other schemes that it misreads or does not load come with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling import first_of
from tiny_architectures import ARCHITECTURES, write_float
from transformers import AutoModelForCausalLM

import cpumoe
from cpumoe import Scheme
from cpumoe.checkpoints.formats.compressed_storages import formats_of
from cpumoe.demo.model import FOLDER
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.scheme import INTEGERS, SCHEMES, WHOLE_FLOATS

#: With every expert chosen, rounding moves no token to another expert, and logits can be compared.
EVERY_EXPERT = {
    name: {
        "num_experts_per_tok": next(sizes[k] for k in sizes if k.startswith(("num_experts", "num_local", "n_routed"))),
        **({"n_group": 1, "topk_group": 1} if "n_group" in sizes else {}),
    }
    for name, sizes in ARCHITECTURES.items()
}
READ = [name for name in ARCHITECTURES if name != "gpt_oss"]

#: name -> architecture, tied, and what is done with the float model.
CASES = {
    **{f"{name}-{tied}": (name, tied, "w4a8-g32", "quantize", None) for name in READ for tied in ("tied", "untied")},
    **{f"scheme-{s}": ("qwen3_moe", "untied", s, "quantize", None) for s in ("w4a8", "w4a8-g64", "w8a8")},
    **{f"linears-{s}": ("qwen3_moe", "tied", "w4a8-g32", "quantize", s) for s in ("float", "w8a8")},
    **{f"saved-{name}": (name, "tied", "w4a8-g32", "save", None) for name in ("qwen3_moe", "mixtral", "llama4_text")},
    **{f"head-{name}": (name, "tied", "w4a8-g32", "load", "w8a8") for name in ("qwen3_moe", "mixtral")},
    **{f"accelerated-{s}": ("mixtral", "tied", "w4a8-g32", "accelerate", s) for s in (None, "w8a8")},
}

_STOCK = """
import json, sys, torch
from pathlib import Path
import transformers
from transformers import AutoModelForCausalLM
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
ids = torch.load(sys.argv[2])
results = {}
for folder in json.loads(sys.argv[1]):
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            logits = model(ids).logits
    except Exception as problem:
        results[folder] = repr(problem)
        continue
    results[folder] = {"logits": logits, "weights": model.state_dict(), "missing": sorted(info["missing_keys"]),
                       "unexpected": sorted(info["unexpected_keys"])}
assert "cpumoe" not in sys.modules
torch.save(results, sys.argv[2])
"""

IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def read_by_transformers(folders, tmp_path):
    """Loads folders in a process that has not imported cpumoe: for each its results, or the error as text."""
    exchange = tmp_path / "exchange.pt"
    torch.save(IDS, exchange)
    command = [sys.executable, "-c", _STOCK, json.dumps([str(folder) for folder in folders]), exchange]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return torch.load(exchange)


def write(folder, architecture, tied, scheme, how, linears):
    source = folder.with_name(f"{folder.name}-float")
    hidden = {"hidden_size": 128, "moe_intermediate_size": 64} if scheme.endswith("g64") else {}
    write_float(source, architecture, tie_word_embeddings=tied == "tied", **EVERY_EXPERT[architecture], **hidden)
    if how == "quantize":
        cpumoe.quantize_checkpoint(source, folder, scheme, linears=linears)
    elif how == "save":
        cpumoe.quantize_checkpoint(source, folder.with_name(f"{folder.name}-quantized"), scheme)
        cpumoe.load_model(folder.with_name(f"{folder.name}-quantized"), dtype=torch.float32).save_pretrained(folder)
    elif how == "load":
        cpumoe.load_model(source, scheme=scheme, linears=linears, dtype=torch.float32).save_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        cpumoe.accelerate(model, scheme, linears=linears).save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def others(tmp_path_factory, request):
    """Every case that is tested, written, and what transformers alone makes of it."""
    root = tmp_path_factory.mktemp("written")
    users = (item for item in request.session.items if "others" in item.fixturenames)
    tested = {item.callspec.params["name"] for item in users if hasattr(item, "callspec")}
    for name in tested:
        write(root / name, *CASES[name])
    return root, read_by_transformers([FOLDER, *(root / name for name in tested)], root)


def ours(folder):
    with torch.no_grad():
        return cpumoe.load_model(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("name", first_of(list(CASES)[::5], 6, CASES))
def test_transformers_alone_reads_it(others, name):
    root, results = others
    theirs = results[str(root / name)]
    assert not isinstance(theirs, str), theirs
    assert theirs["missing"] == theirs["unexpected"] == []
    expected = ours(root / name)
    error = float((theirs["logits"] - expected).norm() / expected.norm())
    # The weights are the same. Activations are not: transformers leaves those of experts in float, and has those of
    # other linears symmetric, where ours are asymmetric; two layers of random weights make 0.02 to 0.042 of it, and
    # 0.002 to 0.016 where those linears are float. Experts that are made up give 1.1 to 1.3.
    assert error < (0.03 if name in ("linears-float", "accelerated-None") else 0.07)


def test_transformers_alone_reads_the_shipped_model(others):
    theirs, expected = others[1][str(FOLDER)], ours(FOLDER)
    assert not isinstance(theirs, str), theirs
    assert theirs["missing"] == theirs["unexpected"] == []
    assert float((theirs["logits"] - expected).norm() / expected.norm()) < 0.07


def dense(stored, name, bits):
    """The weight of a pack-quantized linear, decoded with nothing of ours: fp32 [rows, columns]."""
    _, columns = stored[f"{name}.weight_shape"].tolist()
    words, scale = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"].float()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :columns] - (1 << (bits - 1))
    return values.float() * scale.repeat_interleave(columns // scale.shape[1], 1)


@pytest.mark.parametrize("name", first_of([n for n, case in CASES.items() if case[0] == "qwen3_moe"], 3))
def test_every_weight_is_what_transformers_alone_computes_with(others, name):
    root, results = others
    stored = {k: t for path in (root / name).glob("*.safetensors") for k, t in load_file(path).items()}
    _, _, scheme, _, linears = CASES[name]
    bits = {True: int(scheme[1]), False: int((scheme if linears in (None, "float") else linears)[1])}
    weights = results[str(root / name)]["weights"]
    experts: dict[str, dict[int, torch.Tensor]] = {}
    quantized = [key.removesuffix(".weight_packed") for key in stored if key.endswith(".weight_packed")]
    assert quantized
    for module in quantized:
        weight = dense(stored, module, bits[".experts." in module])
        if ".experts." in module:
            layer, _, rest = module.partition(".experts.")
            number, _, projection = rest.partition(".")
            experts.setdefault(f"{layer}.experts.{projection}", {})[int(number)] = weight
        else:
            assert torch.equal(weights[f"{module}.weight"], weight), module
    stacks = {key: torch.stack([parts[e] for e in sorted(parts)]) for key, parts in experts.items()}
    for key, gate in stacks.items():
        if key.endswith(".gate_proj"):
            prefix = key.removesuffix(".gate_proj")
            assert torch.equal(weights[f"{prefix}.gate_up_proj"], torch.cat((gate, stacks[f"{prefix}.up_proj"]), 1))
            assert torch.equal(weights[f"{prefix}.down_proj"], stacks[f"{prefix}.down_proj"])


def check_warnings(tmp_path, caplog, cases):
    """Write qwen3_moe in schemes and formats: a warning comes for those that transformers alone misreads, and no other.

    If one of these begins to be read, the documentation and the warning are to be changed.
    """
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}  # two blocks of an fp8-block matrix
    write_float(tmp_path / "qwen", "qwen3_moe", **sizes, **EVERY_EXPERT["qwen3_moe"])
    warnings = {}
    for scheme, form in cases:
        caplog.clear()
        folder = tmp_path / f"{scheme}-{form}"
        with caplog.at_level(logging.WARNING, "cpumoe"):
            cpumoe.quantize_checkpoint(tmp_path / "qwen", folder, scheme, linears="float", format=form)
        warnings[folder] = [record.getMessage() for record in caplog.records if record.name == "cpumoe"]
    results = read_by_transformers(list(warnings), tmp_path)
    for folder, told in warnings.items():
        theirs = results[str(folder)]
        assert len(told) <= 1 and all("load it with cpumoe.load_model" in warning for warning in told)
        if isinstance(theirs, str):
            assert "conversion of the weights" in theirs and "transformers without cpumoe cannot load" in told[0]
            continue
        expected = ours(folder)
        error = float((theirs["logits"] - expected).norm() / expected.norm())
        assert (error > 0.5) == bool(told), (folder.name, error)
        assert not told or "leaves out the global scales" in told[0]


def test_a_warning_tells_what_transformers_alone_misreads(tmp_path, caplog):
    check_warnings(tmp_path, caplog, [(name, "pack-quantized") for name in ("nvfp4a16", "fp8-block", "mxfp4a16")])


@pytest.mark.full
def test_a_warning_comes_for_these_schemes_and_no_others(tmp_path, caplog):
    cases = []
    for name in (name for name in SCHEMES if "+" not in name):
        scheme = Scheme.parse(name)
        if scheme.weights.element in WHOLE_FLOATS or not formats_of(scheme) or needs_input_scales(scheme):
            continue  # not written, or not without a calibration
        cases.append((name, "pack-quantized"))
        if scheme.weights.element in INTEGERS and scheme.activations is not None:
            cases.append((name, "int-quantized"))
    check_warnings(tmp_path, caplog, cases)


@pytest.mark.full
def test_fused_experts_are_made_up(tmp_path, caplog):
    write_float(tmp_path / "gpt", "gpt_oss")
    with caplog.at_level(logging.WARNING, "cpumoe"):
        cpumoe.quantize_checkpoint(tmp_path / "gpt", tmp_path / "experts", "w4a8-g32")
    assert "transformers without cpumoe knows experts of gpt_oss in one tensor only" in caplog.text
    results = read_by_transformers([tmp_path / "experts"], tmp_path)
    assert any("experts.gate_up_proj" in name for name in results[str(tmp_path / "experts")]["missing"])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("scheme", ["w4a8", "w4a8-g32", "w8a8"])
def test_compressed_tensors_reads_every_linear(tmp_path, architecture, form, scheme):
    """The values that the package of that name decompresses are those that we compute with, gpt-oss included."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    write_float(tmp_path / "float", architecture, tie_word_embeddings=True, dtype=torch.bfloat16)
    cpumoe.quantize_checkpoint(tmp_path / "float", tmp_path / "q", scheme, format=form)
    section = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    assert "lm_head" in config.ignore
    group = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = {k: t for path in (tmp_path / "q").glob("*.safetensors") for k, t in load_file(path).items()}
    names = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    assert any(".experts.3." in name for name in names)
    for name in names:
        parts = {k.rpartition(".")[2]: t for k, t in stored.items() if k.startswith(f"{name}.")}
        parts.pop("bias", None)
        decompressed = compressor.decompress(dict(parts), group)["weight"]
        if form == "int-quantized":
            scale = parts["weight_scale"].float()
            columns = parts["weight"].shape[1]
            expected = parts["weight"].float() * scale.repeat_interleave(columns // scale.shape[1], 1)
        else:
            expected = dense(stored, name, int(scheme[1]))
        assert torch.equal(decompressed.float(), expected.to(decompressed.dtype).float()), name


def test_the_path_of_a_head_is_named_inside_a_larger_model_too(tmp_path):
    """A language model that is part of another, with a tied head: both names that it may have are left alone."""
    source = write_float(tmp_path / "float", "llama4_text", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    save_file({f"language_model.{name}": t for name, t in tensors.items()}, source / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32")
    ignore = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "language_model.lm_head"} <= set(ignore)
