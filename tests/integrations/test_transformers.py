"""Models as users of transformers meet them: right weights, no silent gaps, and files that can be saved and loaded."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from changed_checkpoints import CHECKPOINTS as EXAMPLES
from every_architecture import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_layers import relative_error
from safetensors.torch import load_file, save
from sampling import first_of, sampled_product
from tiny_architectures import ARCHITECTURES, apart, quantized_tensors, write_float, write_quantized, write_tensors
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Llama4Config, Llama4ForConditionalGeneration, pipeline

import cpumoe
from cpumoe import CheckpointError, Experts, QuantizedLinear, UnsupportedScheme
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.integrations.transformers.int8_cache import holds_records
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.reference import dequantize

transformers.logging.disable_progress_bar()

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))

#: Every kind of weights, and every form; test_loading.py has all schemes for the experts.
QUANTIZED = [
    ("w4a8-g32", "pack-quantized"),
    ("w8a8", "int-quantized"),
    ("w4a16-g32-asym", "pack-quantized"),
    ("w8a16", "pack-quantized"),
    ("mxfp4a16", "mxfp4-pack-quantized"),
    ("nvfp4a16", "nvfp4-pack-quantized"),
]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Makes float checkpoints and quantised ones, each once."""
    root = tmp_path_factory.mktemp("models")

    class Models:
        def float(self, architecture: str) -> Path:
            folder = root / architecture
            return folder if folder.exists() else write_float(folder, architecture)

        def quantized(self, architecture: str, scheme: str = "w4a8-g32", form: str = "pack-quantized") -> Path:
            folder = root / f"{architecture}-{scheme}-{form}"
            if not folder.exists():
                write_quantized(self.float(architecture), folder, scheme, form, shards=2)
            return folder

    return Models()


def load(folder: Path, **options) -> transformers.PreTrainedModel:
    return cpumoe.load_model(folder, **{"dtype": torch.float32, **options})


def load_stock(folder: Path, **options) -> transformers.PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def changed(source: Path, folder: Path, tensors=None, config=None) -> Path:
    """A copy of a checkpoint in one file, with its tensors and its configuration put through functions."""
    shutil.copytree(source, folder)
    held = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    if tensors is not None:
        tensors(held)
    write_tensors(folder, held)
    if config is not None:
        section = json.loads((folder / "config.json").read_text())
        config(section)
        (folder / "config.json").write_text(json.dumps(section))
    return folder


def packed_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts | QuantizedLinear)}


def assert_same_model(model: nn.Module, other: nn.Module) -> None:
    """The same tensors to the bit. PyTorch's float products may differ in the last one: they depend on addresses."""
    tensors, others = model.state_dict(), other.state_dict()
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]), name
    modules = packed_modules(model)
    assert all(repr(modules[name]) == repr(module) for name, module in packed_modules(other).items())
    assert relative_error(logits(model), logits(other)) <= 0.01


def assert_equal(name: str, held: torch.Tensor, expected: torch.Tensor, scheme: cpumoe.Scheme) -> None:
    """To the bit, but for nvfp4: a product with the inverse of its global scale is not quite the quotient."""
    if scheme.weights.scale == "e4m3":
        rtol = 2e-7 if held.dtype == torch.float32 else 2.0**-7  # compressed-tensors makes bf16 of it
        torch.testing.assert_close(held.float(), expected, rtol=rtol, atol=0, msg=lambda text: f"{name}: {text}")
    else:
        assert torch.equal(held, expected), name


# ---- the right weights ---------------------------------------------------------------------------------------------


def assert_holds_weights_of(model: nn.Module, twin: nn.Module) -> None:
    """Every tensor of the float twin is in the model: as it is, or packed to the bit."""
    packed = packed_modules(model)
    state = model.state_dict()
    interleaved = twin.config.model_type == "gpt_oss"
    for name, tensor in twin.state_dict().items():
        module, _, last = name.rpartition(".")
        if module not in packed:
            assert torch.equal(state[name], tensor), name
        elif isinstance(packed[module], QuantizedLinear):
            weight = unpack_weight(packed[module].weight_packed)[0]
            held = dequantize(weight) if last == "weight" else weight.bias
            assert_equal(name, held, tensor, packed[module].scheme)
        else:
            experts = packed[module].quantized()
            held = {
                "gate_up_proj": dequantize(experts.gate_up),
                "down_proj": dequantize(experts.down),
                "gate_up_proj_bias": experts.gate_up.bias,
                "down_proj_bias": experts.down.bias,
            }[last]
            if tensor.dim() == 3 and twin.config.model_type in ("gpt_oss", "llama4_text"):
                tensor = tensor.transpose(1, 2)
            if interleaved and last.startswith("gate_up"):
                tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
            assert_equal(name, held, tensor, packed[module].config.scheme)


def assert_layers_agree(model: nn.Module, twin: nn.Module, tolerance: float) -> None:
    """Every block of experts and every linear, given what the twin's is given, answers what the twin's answers."""
    calls: dict[str, tuple] = {}

    def record(name):
        def hook(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            calls[name] = (inputs, output.clone())  # Llama 4 adds the experts' output to it

        return hook

    experts = {name.rpartition(".")[0] for name, m in packed_modules(model).items() if isinstance(m, Experts)}
    linears = {name for name, m in packed_modules(model).items() if isinstance(m, QuantizedLinear)}
    handles = [twin.get_submodule(name).register_forward_hook(record(name)) for name in experts | linears]
    logits(twin)
    for handle in handles:
        handle.remove()
    assert set(calls) == experts | linears
    for name, (inputs, expected) in calls.items():
        with torch.no_grad():
            out = model.get_submodule(name)(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        assert relative_error(out.view(expected.shape), expected) <= tolerance, name


@pytest.mark.parametrize(("scheme", "form", "architecture"), sampled_product(QUANTIZED, list(ARCHITECTURES)))
def test_a_quantised_checkpoint_becomes_the_model_it_says(models, architecture, scheme, form):
    folder = models.quantized(architecture, scheme, form)
    model, twin = load(folder), load_stock(folder.with_name(f"{folder.name}-float"))
    in_float = {"lm_head", *(n for n, m in twin.named_modules() if n.endswith((".router", "shared_expert_gate")))}
    linears = {n for n, m in twin.named_modules() if isinstance(m, nn.Linear)} - in_float
    experts = {n for n, _ in twin.named_modules() if n.endswith(".experts")}
    assert experts and set(packed_modules(model)) == linears | experts
    assert_holds_weights_of(model, twin)
    assert_layers_agree(model, twin, 1e-3 if "a16" in scheme else 0.03)
    per_token = (logits(model) - logits(twin)).norm(dim=-1) / logits(twin).norm(dim=-1)
    # not the mean: a token whose router was undecided goes another way
    assert float(per_token.median()) <= 0.05


@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_from_pretrained_gives_the_same_model(models, architecture):
    folder = models.quantized(architecture)
    model = load_stock(folder)
    assert packed_modules(model)
    assert_same_model(model, load(folder))


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen2_moe", "deepseek_v3", "llama4_text"])
def test_models_run_in_bf16(models, architecture):
    folder = models.quantized(architecture)
    model = load(folder, dtype=torch.bfloat16)
    out = logits(model)
    assert out.dtype == torch.bfloat16 and model.dtype == torch.bfloat16
    per_token = (out.float() - logits(load(folder))).norm(dim=-1) / logits(load(folder)).norm(dim=-1)
    assert float(per_token.median()) <= 0.1
    for block in (m for m in model.modules() if isinstance(m, Experts)):
        x = torch.randn(5, 64)
        ids, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
        exact = block.reference(x.bfloat16().float(), ids, weights, quantize_activations=False)
        assert relative_error(block(x.bfloat16(), ids, weights), exact) <= 0.03


def test_no_tokens_are_no_problem(models):
    block = load(models.quantized("qwen3_moe")).model.layers[0]
    assert block.mlp(torch.zeros(1, 0, 64)).shape == (1, 0, 64)
    assert block.self_attn.q_proj(torch.zeros(0, 64)).shape == (0, 64)


def test_every_activation_of_the_configuration_is_computed(tmp_path):
    for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu2", "swish"):
        folder = write_float(tmp_path / name, "qwen3_moe", hidden_act=name)
        assert_layers_agree(load(folder, scheme="w8a8"), load_stock(folder), 0.03)


def test_layers_for_further_tokens_are_left_out(models, tmp_path):
    """DeepSeek-V3 and GLM-4.5 have layers behind the last, which the model does not use."""

    def add_layer(tensors):
        for name in [n for n in tensors if "layers.1." in n]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()
        tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)

    folder = models.quantized("deepseek_v3")
    with_guess = changed(folder, tmp_path / "a", add_layer, lambda c: c.update(num_nextn_predict_layers=1))
    assert_same_model(load(with_guess), load(folder))
    unannounced = changed(folder, tmp_path / "b", add_layer, lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match="unexpected: model.layers.2.eh_proj.weight"):
        load(unannounced)


@pytest.mark.parametrize("further", [1, 10**18])
def test_a_layer_of_the_model_is_not_taken_for_one_that_predicts_further_tokens(models, tmp_path, further):
    """One layer too few in config.json would give a model that answers, and wrongly."""
    shorter = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": further}
    source = models.quantized("deepseek_v3")
    folder = changed(source, tmp_path / "a", lambda tensors: None, lambda c: c.update(shorter))
    for call in (load, load_stock):
        with pytest.raises(CheckpointError, match="unexpected: .*model.layers.1.input_layernorm.weight"):
            call(folder)
    folder = changed(source, tmp_path / "b", config=lambda c: c.update(num_nextn_predict_layers=further))
    assert_same_model(load(folder), load(source))


def test_a_layer_that_transformers_leaves_out_by_its_number_is_not_lost(models, tmp_path):
    """It skips model.layers.61 of every DeepSeek-V3, whatever num_hidden_layers says."""
    name = "model.layers.61.input_layernorm.weight"
    folder = changed(models.quantized("deepseek_v3"), tmp_path / "a", with_another(name)[1])
    for call in (load, load_stock):
        with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
            call(folder)


@pytest.fixture(scope="module")
def llama4_with_images(models, tmp_path_factory):
    """Llama 4 as it is published: the language model inside one that also sees."""
    folder = tmp_path_factory.mktemp("llama4") / "model"
    text = json.loads((models.float("llama4_text") / "config.json").read_text())
    sizes = ("hidden_size", "projector_input_dim", "projector_output_dim", "vision_output_dim", "intermediate_size")
    vision = dict.fromkeys(sizes, 64) | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    tokens = {"boi_token_index": 100, "eoi_token_index": 101, "image_token_index": 102}
    config = Llama4Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    Llama4ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_the_language_model_of_a_larger_model_is_loaded_alone(llama4_with_images, tmp_path):
    twin = load_stock(llama4_with_images)
    for options in ({"scheme": "w8a8"}, {"scheme": "w8a8", "linears": "w8a8"}):
        model = load(llama4_with_images, **options)
        assert_layers_agree(model, twin, 0.03)
        assert len(packed_modules(model)) == (1 if len(options) == 1 else 16)


def test_a_quantised_language_model_of_a_larger_model_is_loaded(llama4_with_images, tmp_path):
    def quantize(tensors):
        language = {n: tensors.pop(n) for n in list(tensors) if n.startswith("language_model.")}
        head = {"language_model.lm_head.weight": language.pop("language_model.lm_head.weight")}
        stored, _ = quantized_tensors(apart(language, "llama4_text"), "w8a8", "int-quantized")
        tensors.update(stored | head)

    def configure(config):
        example = json.loads((EXAMPLES / "qwen3moe-w8a8-int8" / "config.json").read_text())
        ignore = ["re:.*lm_head", "re:.*router", "re:vision_model.*", "re:multi_modal_projector.*"]
        config["quantization_config"] = example["quantization_config"] | {"ignore": ignore}

    folder = changed(llama4_with_images, tmp_path / "model", quantize, configure)
    twin = load_stock(llama4_with_images)
    model = load(folder)
    assert len(packed_modules(model)) == 15
    assert_layers_agree(model, twin, 0.05)  # the weights are rounded too
    whole = Llama4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert_same_model(whole.language_model, model)


# ---- what users do with a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_generate_gives_what_a_greedy_loop_gives(models, architecture):
    model = load(models.quantized(architecture))
    ids = IDS
    for _ in range(6):
        scores = logits(model, ids)[:, -1]
        scores[:, model.config.eos_token_id] = -torch.inf
        ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
    for use_cache in (True, False):
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
        out = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
        assert torch.equal(out, ids)


def test_pipeline_writes_text():
    folder = EXAMPLES / "qwen3moe-w4a8-g32-packed"
    write = pipeline("text-generation", model=load(folder), tokenizer=AutoTokenizer.from_pretrained(folder))
    text = write("hello", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("hello") and len(text) > len("hello")
    again = pipeline("text-generation", model=str(folder), dtype=torch.float32)
    assert packed_modules(again.model)
    assert again("hello", max_new_tokens=4, do_sample=False)[0]["generated_text"] == text


@pytest.mark.parametrize("architecture", first_of(["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"], 1))
def test_a_compiled_model_gives_the_same(models, architecture, monkeypatch):
    monkeypatch.setenv("CPUMOE_STEPS", "0")  # a compiler sees the model's own code
    model = load(models.quantized(architecture))
    expected = logits(model)
    torch._dynamo.reset()
    assert relative_error(logits(torch.compile(model, backend="aot_eager", fullgraph=True)), expected) <= 1e-4


@pytest.mark.full
def test_a_model_compiled_to_machine_code_gives_the_same(tmp_path):
    model = load(write_float(tmp_path / "model", "qwen3_moe", num_hidden_layers=1), scheme="w8a8")
    torch._dynamo.reset()
    assert relative_error(logits(torch.compile(model)), logits(model)) <= 1e-4


@pytest.mark.full
@pytest.mark.parametrize("order", ["transformers first", "cpumoe first"])
def test_the_order_of_imports_does_not_matter(models, order, started):
    assert started[order].wait() == 0, started[order].stderr.read()
    expected = float(logits(load(models.quantized("qwen3_moe"))).double().abs().sum())
    assert float(started[order].stdout.read()) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def started(models):
    """One process per order of imports, all at once because each needs seconds to import."""
    imports = {
        "cpumoe first": "import cpumoe\nimport transformers",
        "transformers first": "import transformers\nfrom transformers import AutoModelForCausalLM\nimport cpumoe",
    }
    use = f"""
import torch
model = transformers.AutoModelForCausalLM.from_pretrained({str(models.quantized("qwen3_moe"))!r}, dtype=torch.float32)
assert type(model.model.layers[0].mlp.experts) is cpumoe.Experts
print(float(model(torch.tensor({IDS.tolist()})).logits.double().abs().sum()))
"""
    yield (
        processes := {
            order: subprocess.Popen(
                [sys.executable, "-c", f"{text}\n{use}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for order, text in imports.items()
        }
    )
    for process in processes.values():
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_importing_cpumoe_does_not_import_transformers():
    subprocess.run([sys.executable, "-c", "import sys, cpumoe; assert 'transformers' not in sys.modules"], check=True)


@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_copy_of_a_model_is_a_model_of_its_own(models, architecture):
    """Routers of copies once went on with the weights of the original."""
    model = load(models.quantized(architecture))
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_model(copied, model)
        for name, parameter in copied.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.data.neg_()
        assert relative_error(logits(copied), expected) > 0.1
    assert torch.equal(logits(model), expected)


@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_next_token_does_not_depend_on_how_the_others_were_read(models, architecture):
    """All at once, one after another through the cache, and beside a longer sequence with padding on the left."""
    model = load(models.quantized(architecture))
    ids = torch.randint(3, 128, (1, 24))  # longer than the window of gpt-oss
    expected = logits(model, ids)[:, -1]
    with torch.no_grad():
        past = model(ids[:, :-2], use_cache=True).past_key_values
        past = model(ids[:, -2:-1], past_key_values=past).past_key_values
        assert relative_error(model(ids[:, -1:], past_key_values=past).logits[:, -1], expected) <= 0.02
        padded = torch.cat((torch.zeros(1, 6, dtype=torch.int64), ids), 1)
        batch = torch.cat((padded, torch.randint(3, 128, (1, 30))))
        mask = torch.ones_like(batch)
        mask[0, :6] = 0
        first = model(batch[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        last = model(batch[:, -1:], attention_mask=mask, past_key_values=first.past_key_values).logits[:1, -1]
    assert relative_error(last, expected) <= 0.05


# ---- saving --------------------------------------------------------------------------------------------------------


def assert_survives_saving(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    assert_same_model(load(folder, dtype=model.dtype), model)


@pytest.mark.parametrize(("scheme", "form", "architecture"), sampled_product(QUANTIZED, list(ARCHITECTURES)))
def test_a_quantised_model_survives_saving(models, tmp_path, architecture, scheme, form):
    model = load(models.quantized(architecture, scheme, form))
    assert_survives_saving(model, tmp_path / "saved")
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert section["format"] == form


@pytest.mark.parametrize("architecture", first_of(["qwen3_moe", "gpt_oss", "deepseek_v3"], 3, ARCHITECTURES))
def test_a_model_with_two_schemes_survives_saving(models, tmp_path, architecture):
    """Experts of one scheme and linears of another, in the dtype whose biases are narrower than what is packed."""
    model = load(models.float(architecture), scheme="w4a8-g32", linears="w8a8", dtype=torch.bfloat16)
    assert_survives_saving(model, tmp_path / "saved")


@pytest.mark.parametrize("architecture", first_of(["qwen3_moe", "gpt_oss", "deepseek_v3"], 3, ARCHITECTURES))
def test_linears_alone_survive_saving(models, tmp_path, architecture):
    model = load(models.float(architecture), linears="w8a8")
    assert {str(m.config.scheme) for m in model.modules() if isinstance(m, Experts)} == {"fp32"}
    assert_survives_saving(model, tmp_path / "saved")
    left = load(models.float(architecture), scheme="float", linears="w8a8")
    assert not any(isinstance(m, Experts) for m in left.modules())
    left.save_pretrained(tmp_path / "left")
    assert_same_model(load(tmp_path / "left"), model)


@pytest.mark.parametrize("architecture", first_of(["qwen3_moe", "gpt_oss", "deepseek_v3"], 3, ARCHITECTURES))
def test_an_accelerated_model_is_the_one_that_load_model_makes_and_survives_saving(models, tmp_path, architecture):
    model = load_stock(models.float(architecture))
    assert cpumoe.accelerate(model, "w4a8-g32", linears="w8a8") is model
    assert_same_model(model, load(models.float(architecture), scheme="w4a8-g32", linears="w8a8"))
    assert_survives_saving(model, tmp_path / "saved")


def test_a_model_saved_in_pieces_and_saved_twice_is_whole(models, tmp_path):
    model = load(models.quantized("qwen3_moe"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    again = load(tmp_path / "saved")
    assert_same_model(again, model)
    again.save_pretrained(tmp_path / "saved")  # in one file now
    assert_same_model(load(tmp_path / "saved"), model)


def test_a_float_model_loaded_as_such_is_saved_as_such(models, tmp_path):
    model = load(models.float("qwen3_moe"), scheme="float")
    assert not packed_modules(model)
    assert_same_model(model, load_stock(models.float("qwen3_moe")))
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same_model(load_stock(tmp_path / "saved"), model)


@pytest.mark.parametrize(
    ("scheme", "linears"),
    [
        *(("w4a8-g32", "w8a8"), ("w4a16-g32", "w8a16"), ("w4a16-g32-asym", "w4a16-asym"), ("w8a16-g32", "w4a16")),
        *(("nvfp4a16", "nvfp4a16"), ("mxfp4a16", "mxfp4a16")),
    ],
)
@pytest.mark.parametrize("architecture", first_of(["qwen3_moe", "gpt_oss"], 1))
def test_compressed_tensors_decompresses_what_was_saved(models, tmp_path, architecture, scheme, linears):
    """Its own tool, with its own reading of the configuration, finds every linear and gets our values."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = load(models.float(architecture), scheme=scheme, linears=linears)
    model.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    tree = nn.Module()
    linears = {n.rpartition(".")[0] for n in stored if n.endswith(".weight_packed")}
    linears |= {n.rpartition(".")[0] for n in stored if n.endswith((".gate.weight", "router.weight"))}
    for name in linears:
        *parents, last = name.split(".")
        parent = tree
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        shape = (4, 64)  # of routers
        if f"{name}.weight_shape" in stored:
            shape = stored[f"{name}.weight_shape"].tolist()
        elif f"{name}.weight_packed" in stored:  # of 4-bit floats, two to a byte
            rows, width = stored[f"{name}.weight_packed"].shape
            shape = (rows, 2 * width)
        parent.add_module(last, nn.Linear(shape[1], shape[0], bias=f"{name}.bias" in stored))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(config)
    apply_quantization_config(tree, theirs)
    compressor = ModelCompressor(quantization_config=theirs)
    compressor.compress_model(tree)
    mine = {n: t for n, t in stored.items() if n.rpartition(".")[0] in linears}
    tree.load_state_dict(
        {n: mine[n] if "weight_" in n or n.endswith("bias") else t for n, t in tree.state_dict().items()}
    )
    compressor.decompress_model(tree)
    for name, module in packed_modules(model).items():
        if isinstance(module, QuantizedLinear):
            weight = dequantize(unpack_weight(module.weight_packed)[0])
            assert_equal(name, tree.get_submodule(name).weight, weight, module.scheme)
        else:
            held = module.quantized()
            down = dequantize(held.down)
            gate, up = dequantize(held.gate_up).chunk(2, 1)
            for expert in range(module.config.experts):
                for projection, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                    got = tree.get_submodule(f"{name}.{expert}.{projection}").weight
                    assert_equal(f"{name}.{expert}.{projection}", got, weight[expert], module.config.scheme)
    routers = [n for n in linears if f"{n}.weight_packed" not in stored]
    assert routers and not any(hasattr(tree.get_submodule(n), "quantization_scheme") for n in routers)


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_experts_are_quantised_as_they_are_read(models, architecture):
    model = load(models.float(architecture), scheme="w8a8")
    twin = load_stock(models.float(architecture))
    assert {name.rpartition(".")[2] for name in packed_modules(model)} == {"experts"}
    assert_layers_agree(model, twin, 0.03)


def test_a_float_checkpoint_runs_as_it_is_unless_something_else_is_asked_for(models, monkeypatch):
    monkeypatch.delenv("CPUMOE_SCHEME", raising=False)
    model = load(models.float("qwen3_moe"))
    assert str(model.model.layers[0].mlp.experts.config.scheme) == "fp32"
    monkeypatch.setenv("CPUMOE_SCHEME", "w4a8-g32")
    model = load(models.float("qwen3_moe"))
    assert str(model.model.layers[0].mlp.experts.config.scheme) == "w4a8-g32"
    monkeypatch.setenv("CPUMOE_SCHEME", "float")
    assert not packed_modules(load(models.float("qwen3_moe")))
    monkeypatch.setenv("CPUMOE_SCHEME", "w5a8")
    with pytest.raises(UnsupportedScheme, match="scheme 'w5a8' is not known"):
        load(models.float("qwen3_moe"))
    with pytest.raises(UnsupportedScheme, match="scheme 'w5a8' is not known"):
        load(models.float("qwen3_moe"), scheme="float", linears="w5a8")


def test_a_quantised_checkpoint_has_its_scheme(models, monkeypatch):
    with pytest.raises(UnsupportedScheme, match="scheme='w8a8' for a checkpoint that is quantised already"):
        load(models.quantized("qwen3_moe"), scheme="w8a8")
    monkeypatch.setenv("CPUMOE_SCHEME", "w8a8")  # is for float checkpoints
    assert packed_modules(load(models.quantized("qwen3_moe")))


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe"], ids=["tied embeddings", "untied embeddings"])
def test_the_head_is_quantised_with_the_linears(models, architecture):
    for folder, scheme in ((models.float(architecture), "w4a8-g32"), (models.quantized(architecture), None)):
        model = load(folder, scheme=scheme, linears="w8a8")
        head = model.lm_head
        assert isinstance(head, QuantizedLinear) and str(head.scheme) == "w8a8"
        assert isinstance(model.model.embed_tokens, nn.Embedding)
        source = load_stock(models.float(architecture)).lm_head.weight.detach()
        assert relative_error(dequantize(unpack_weight(head.weight_packed)[0]), source) <= 0.01
        assert torch.equal(
            model.model.embed_tokens.weight, load_stock(models.float(architecture)).model.embed_tokens.weight
        )


def test_linears_that_a_group_size_does_not_fit_stay_in_float_with_a_warning(models, caplog, tmp_path):
    folder = write_float(tmp_path / "model", "qwen3_moe", head_dim=32)  # o_proj has 128 inputs, the others 64
    model = load(folder, scheme="float", linears="w4a8-g128")
    assert {name.rpartition(".")[2] for name in packed_modules(model)} == {"o_proj"}
    assert (
        "left in float: model.layers.0.self_attn.q_proj: group_size=128 does not divide in_features=64" in caplog.text
    )
    assert_survives_saving(load(folder, linears="w4a8-g128"), tmp_path / "saved")


def test_a_group_size_that_fits_nothing_is_refused(models):
    with pytest.raises(UnsupportedScheme, match="no module of this model can be packed"):
        load(models.float("qwen3_moe"), scheme="float", linears="w4a8-g128")
    with pytest.raises(UnsupportedScheme, match="group_size=128 does not divide in_features=64; use 32, 64"):
        load(models.float("qwen3_moe"), scheme="w4a8-g128")


@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", {"": 0}, {"model": "cpu", "lm_head": "disk"}])
def test_other_devices_are_refused(models, device_map):
    for call in (load, load_stock):
        with pytest.raises((ValueError, RuntimeError), match="packed weights run on 'cpu'|cuda|CUDA"):
            call(models.quantized("qwen3_moe"), device_map=device_map)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_the_cpu_is_accepted_by_name(models, device_map):
    assert packed_modules(load(models.quantized("qwen3_moe"), device_map=device_map))


def test_the_dtype_of_the_float_parts_is_chosen_and_told(models, caplog):
    caplog.set_level(logging.INFO, "cpumoe")
    chosen, reason = cpumoe.cpu.float_dtype()
    model = cpumoe.load_model(models.quantized("qwen3_moe"))
    assert model.dtype == chosen
    assert f"float parts run in {chosen}: {reason}" in caplog.text
    assert load(models.quantized("qwen3_moe"), dtype=torch.float16).dtype == torch.float16


def test_schemes_that_are_not_served_are_refused_or_left_to_transformers(models, tmp_path, caplog):
    def asymmetric(config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["weights"] |= {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
        group["weights"]["symmetric"] = False
        group["format"] = config["quantization_config"]["format"] = "float-quantized"

    folder = changed(models.quantized("qwen3_moe"), tmp_path / "fp8", config=asymmetric)
    with pytest.raises(UnsupportedScheme, match="weights asymmetric 8-bit float per channel.* is not served"):
        load(folder)
    with pytest.raises(Exception):  # transformers' own reader, which does not find fp8 in these files
        load_stock(folder)
    assert "cpumoe does not read this checkpoint" in caplog.text
    with pytest.raises(UnsupportedScheme, match="quant_method 'quanto' is not served"):
        load(changed(folder, tmp_path / "b", config=lambda c: c.update(quantization_config={"quant_method": "quanto"})))


# ---- what is wrong stops the load ----------------------------------------------------------------------------------


def without(name):
    return name, lambda tensors: tensors.pop(name)


def in_another_shape(name):
    return name, lambda tensors: tensors.update({name: tensors[name][1:].clone()})


def in_another_dtype(name):
    return name, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)})


def with_another(name):
    return name, lambda tensors: tensors.update({name: torch.ones(4)})


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
LINEAR = "model.layers.1.self_attn.q_proj"
FLOAT_PARTS = [
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.1.mlp.gate.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]
DAMAGE = [
    *(without(name) for name in (*FLOAT_PARTS, f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale")),
    *(without(f"{LINEAR}.{last}") for last in ("weight_packed", "weight_scale")),
    *(in_another_shape(name) for name in (*FLOAT_PARTS, f"{EXPERT}.weight_scale", f"{LINEAR}.weight_packed")),
    *(in_another_dtype(name) for name in (*FLOAT_PARTS, f"{EXPERT}.weight_packed", f"{LINEAR}.weight_scale")),
    with_another("model.layers.0.extra"),
    with_another("extra.weight"),
    with_another(f"{LINEAR}.weight_zero_point"),
    with_another(f"{LINEAR}.bias"),
    with_another(f"{EXPERT}.weight_g_idx"),
    with_another("model.layers.0.mlp.experts.8.up_proj.weight_packed"),
    with_another("model.layers.2.input_layernorm.weight"),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage[0])
def test_tensors_that_are_missing_unexpected_or_wrong_stop_the_load(models, tmp_path, damage):
    name, change = damage
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model", change)
    for call in (load, load_stock):
        with pytest.raises(CheckpointError) as refusal:
            call(folder)
        assert name in str(refusal.value)


@pytest.mark.parametrize("options", [{"scheme": "float"}, {"scheme": "w8a8"}, {"scheme": "float", "linears": "w8a8"}])
def test_float_checkpoints_are_checked_as_well(models, tmp_path, options):
    cases = [
        without("model.norm.weight"),
        without("model.layers.1.mlp.experts.3.up_proj.weight"),
        in_another_shape("model.layers.0.self_attn.q_proj.weight"),
        in_another_shape("model.norm.weight"),
        in_another_dtype("model.embed_tokens.weight"),
        with_another("extra.weight"),
    ]
    for index, (name, change) in enumerate(cases):
        folder = changed(models.float("qwen3_moe"), tmp_path / str(index), change)
        with pytest.raises(CheckpointError) as refusal:
            load(folder, **options)
        assert name in str(refusal.value)


def test_the_router_of_mixtral_is_checked_under_its_name_on_disk(models, tmp_path):
    """transformers renames it while loading."""
    name, change = in_another_shape("model.layers.0.mlp.gate.weight")
    with pytest.raises(CheckpointError) as refusal:
        load(changed(models.quantized("mixtral"), tmp_path / "model", change))
    assert name in str(refusal.value)
    example = tmp_path / "example"
    name, change = in_another_dtype("model.layers.1.block_sparse_moe.gate.weight")
    shutil.copytree(EXAMPLES / "mixtral-w4a8-channel", example, ignore=shutil.ignore_patterns("reference*"))
    with pytest.raises(CheckpointError, match=f"{name} is I8"):
        load(changed(example, tmp_path / "integers", change))


def test_a_load_that_failed_leaves_no_file_open(models, tmp_path):
    folders = [
        changed(models.quantized("qwen3_moe"), tmp_path / str(index), change)
        for index, (_, change) in enumerate((without(f"{EXPERT}.weight_scale"), without("model.norm.weight")))
    ]
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # counting is all that is wanted
    for folder in folders * 5:
        with pytest.raises(CheckpointError):
            load(folder)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model"},
        {"model_type": None},
        {"model_type": []},
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"decoder_sparse_step": 0},
        {"hidden_act": "no_such_function"},
        {"num_experts_per_tok": None},
        {"rope_parameters": 3},
        {"text_config": 5},
    ],
    ids=str,
)
def test_a_configuration_of_nonsense_is_refused(models, tmp_path, changes):
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model", config=lambda c: c.update(changes))
    with pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert str(folder) in str(refusal.value)


def test_a_mistake_of_our_own_is_not_blamed_on_the_configuration(models, monkeypatch):
    def mistaken(*_, **__):
        raise TypeError("a mistake")

    monkeypatch.setattr("cpumoe.integrations.transformers.loading.plugin.find_packed_modules", mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        load(models.quantized("qwen3_moe"))


def test_arguments_that_transformers_refuses_are_not_blamed_on_the_configuration(models):
    with pytest.raises((ValueError, ImportError), match="no_such") as refusal:
        load(models.quantized("qwen3_moe"), attn_implementation="no_such")
    assert not isinstance(refusal.value, CheckpointError)


def test_experts_with_parts_that_are_not_understood_are_refused(models, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    made = Qwen3MoeExperts.__init__

    def with_more(self, config):
        made(self, config)
        self.temperature = torch.nn.Parameter(torch.ones(1))

    model = AutoModelForCausalLM.from_pretrained(models.float("qwen3_moe"))
    monkeypatch.setattr(Qwen3MoeExperts, "__init__", with_more)
    reason = "Qwen3MoeExperts has a parameter temperature, and only down_proj, gate_up_proj are known"
    with pytest.raises(UnsupportedScheme, match=reason):
        load(models.float("qwen3_moe"), scheme="w8a8")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Softplus()
    with pytest.raises(UnsupportedScheme, match=r"has an activation \(Softplus\) that is none of silu"):
        cpumoe.accelerate(model)


def test_a_limit_of_zero_is_no_activation_that_we_have():
    with pytest.raises(UnsupportedScheme, match=r"has an activation \(SiLUActivation\) that is none of silu"):
        cpumoe.accelerate(tiny_model("deepseek_v4", swiglu_limit=0.0))


def test_code_from_a_checkpoint_is_never_run(models, tmp_path):
    def evil(config):
        config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}}

    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model", config=evil)
    (folder / "evil.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    with pytest.raises(CheckpointError, match="model_type 'evil' is not known"):
        load(folder)


def test_pickles_are_never_loaded(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models.quantized("qwen3_moe"), folder)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    torch.save({"model.norm.weight": torch.ones(64)}, folder / "pytorch_model.bin")
    for call in (load, load_stock):
        with pytest.raises(CheckpointError, match="pickles are never loaded"):
            call(folder)


def with_shards_at(source: Path, folder: Path, place: Path, named: Callable[[str], str]) -> Path:
    """A copy of a checkpoint whose shards lie in ``place``, and whose index has the names that ``named`` gives."""
    shutil.copytree(source, folder)
    place.mkdir(exist_ok=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in set(index["weight_map"].values()):
        shutil.move(folder / shard, place / shard)
    index["weight_map"] = {name: named(file) for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("way", ["relative", "absolute", "subfolder", "linked subfolder"])
def test_an_index_cannot_lead_out_of_its_folder(models, tmp_path, way):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    names = {
        "relative": lambda file: f"../outside/{file}",
        "absolute": lambda file: str(outside / file),
        "subfolder": lambda file: f"../outside/../outside/{file}",
        "linked subfolder": lambda file: f"linked/{file}",
    }
    with_shards_at(models.quantized("qwen3_moe"), folder, outside, names[way])
    (folder / "linked").symlink_to(outside)
    for call in (load, load_stock):
        with pytest.raises(CheckpointError, match="files of the folder itself are accepted"):
            call(folder)


def test_a_link_cannot_lead_out_of_the_folder(models, tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    with_shards_at(models.quantized("qwen3_moe"), folder, outside, lambda file: file)
    for file in outside.iterdir():
        (folder / file.name).symlink_to(file)
    for call in (load, load_stock):
        with pytest.raises(CheckpointError, match="is a link to .*outside.*; copy the file to its place: cp "):
            call(folder)


@pytest.mark.parametrize("place", ["blobs", "../models--other/blobs"])
def test_the_links_of_the_hub_are_followed_within_one_model(models, tmp_path, monkeypatch, place):
    """The hub's cache keeps files by their hashes in blobs/, and names them by links in snapshots/."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / place
    shutil.copytree(models.quantized("qwen3_moe"), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    blobs.resolve().mkdir(parents=True)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), snapshot))
    (snapshot / "linked").symlink_to(snapshot / "config.json")
    calls = [
        lambda: load(snapshot),
        lambda: load_stock(snapshot),
        lambda: load_stock("org/tiny", cache_dir=tmp_path / "hub", local_files_only=True),
    ]
    for call in calls:
        if place == "blobs":
            assert_same_model(call(), load(models.quantized("qwen3_moe")))
        else:
            with pytest.raises(CheckpointError, match="is a link to .*models--other"):
                call()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_what_is_not_a_file_is_refused_by_name_and_not_waited_for(models, tmp_path, name, kind):
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as at:
            opened = os.open(folder, os.O_RDONLY)
            at.bind(f"/proc/self/fd/{opened}/{name}")  # the length of such a name is limited
            os.close(opened)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=name):
        load(folder)


# ---- float models in place -----------------------------------------------------------------------------------------


def test_accelerate_frees_the_float_weights(models):
    model = load_stock(models.float("qwen3_moe"))
    float_bytes = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    gone = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    gone += [weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers]
    cpumoe.accelerate(model, "w4a8-g32", linears="w8a8")
    gc.collect()
    assert all(reference() is None for reference in gone)
    held = [*model.model.layers.parameters(), *model.model.layers.buffers()]
    # packed rows are padded to 128 inputs, which is much for a model this small
    assert sum(t.numel() * t.element_size() for t in held) < float_bytes / 2


def test_accelerate_says_when_there_is_nothing_to_do(models):
    model = load(models.quantized("qwen3_moe"))
    with pytest.raises(ValueError, match="no float experts to accelerate"):
        cpumoe.accelerate(model)
    assert isinstance(cpumoe.accelerate(model, linears="w8a8").lm_head, QuantizedLinear)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "llama4_text"])
def test_the_experts_implementation_of_transformers(models, architecture):
    model = load_stock(models.float(architecture), experts_implementation="cpumoe-w8a8")
    eager = load_stock(models.float(architecture), experts_implementation="eager")
    expected = logits(eager)
    per_token = (logits(model) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < float(per_token.median()) <= 0.03
    assert model.state_dict().keys() == eager.state_dict().keys()
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), expected)


def test_implementations_can_be_changed(models, monkeypatch):
    model = load_stock(models.float("qwen3_moe"), experts_implementation="eager")
    expected = {"eager": logits(model)}
    for scheme in ("w8a8", "w4a8-g32", "w4a8"):
        fresh = load_stock(models.float("qwen3_moe"), experts_implementation=f"cpumoe-{scheme}")
        expected[f"cpumoe-{scheme}"] = logits(fresh)
        experts = load(models.float("qwen3_moe"), scheme=scheme).model.layers[0].mlp.experts
        packed = fresh.model.layers[0].mlp.experts.__dict__["_cpumoe_packed"][1]
        assert torch.equal(packed.gate_up_packed, experts.gate_up_packed)
    for name in (*expected, *reversed(expected)):
        model.set_experts_implementation(name)
        assert torch.equal(logits(model), expected[name]), name
    model.set_experts_implementation("cpumoe")
    for scheme in ("w8a8", "w4a8"):
        monkeypatch.setenv("CPUMOE_SCHEME", scheme)
        assert torch.equal(logits(model), expected[f"cpumoe-{scheme}"])
    monkeypatch.delenv("CPUMOE_SCHEME")
    with pytest.raises(UnsupportedScheme, match="group_size=128 does not divide in_features=64"):
        logits(model)  # the default


def test_weights_changed_in_place_are_seen(models):
    model = load_stock(models.float("qwen3_moe"), experts_implementation="cpumoe-w8a8")
    before = logits(model)
    assert torch.equal(logits(model), before)
    packed = model.model.layers[0].mlp.experts.__dict__["_cpumoe_packed"][1]
    assert model.model.layers[0].mlp.experts.__dict__["_cpumoe_packed"][1] is packed  # made once
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    changed_weights = logits(model)
    assert not torch.equal(changed_weights, before)
    model.load_state_dict(load_stock(models.float("qwen3_moe")).state_dict())
    assert torch.equal(logits(model), before)


@pytest.mark.full
def test_the_experts_implementation_in_inference_mode_and_compiled(tmp_path):
    folder = write_float(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    expected = logits(load_stock(folder, experts_implementation="cpumoe-w4a8-g32"))
    with torch.inference_mode():
        model = load_stock(folder, experts_implementation="cpumoe-w4a8-g32")
        assert torch.equal(model(IDS).logits, expected)
    model = load_stock(folder, experts_implementation="cpumoe-w4a8-g32")
    torch._dynamo.reset()
    assert relative_error(logits(torch.compile(model, backend="aot_eager")), expected) <= 1e-4


def test_models_that_do_not_ask_for_an_implementation_say_so(models, caplog):
    model = load_stock(models.float("llama4_text"), experts_implementation="cpumoe")
    assert "experts_implementation='cpumoe' has no effect on Llama4ForCausalLM" in caplog.text
    assert "cpumoe.accelerate(model) does the job" in caplog.text
    assert torch.equal(logits(model), logits(load_stock(models.float("llama4_text"))))
    caplog.clear()
    load_stock(models.float("qwen3_moe"), experts_implementation="cpumoe")
    assert "no effect" not in caplog.text


# ---- the packed cache ----------------------------------------------------------------------------------------------


def cache_files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def made(model: nn.Module, folder: Path) -> bool:
    """Whether the weights of a model were packed, and not mapped from a file of the folder."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if str(folder) in line]
    ranges = [(int(start, 16), int(end, 16)) for start, end in ranges]
    pointers = [buffer.data_ptr() for m in packed_modules(model).values() for buffer in m.buffers()]
    return not all(any(start <= pointer < end for start, end in ranges) for pointer in pointers)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4_text", "qwen2_moe"])
def test_the_second_start_maps_the_cache(models, tmp_path, architecture):
    folder = models.quantized(architecture)
    first = load(folder, cache=tmp_path / "cache")
    assert made(first, tmp_path)
    [file] = cache_files(tmp_path / "cache")
    written = file.stat().st_mtime_ns
    with TensorFile(file) as packed:
        assert all(info.start % 64 == 0 for info in packed.tensors.values())
    second = load(folder, cache=tmp_path / "cache")
    assert not made(second, tmp_path) and file.stat().st_mtime_ns == written
    assert_same_model(first, load(folder))
    assert_same_model(second, first)
    assert_survives_saving(second, tmp_path / "saved")


def test_a_changed_source_makes_a_new_cache(models, tmp_path):
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model")
    load(folder, cache=tmp_path / "cache")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERT}.weight_scale"] *= 3
    write_tensors(folder, tensors)
    model = load(folder, cache=tmp_path / "cache")
    assert made(model, tmp_path / "cache")
    assert_same_model(model, load(folder))
    assert len(cache_files(tmp_path / "cache")) == 1
    assert not made(load(folder, cache=tmp_path / "cache"), tmp_path / "cache")


def test_options_have_caches_of_their_own(models, tmp_path):
    folder = models.float("qwen3_moe")
    options = [{"scheme": "w8a8"}, {"scheme": "w4a8-g32"}, {"scheme": "w8a8", "linears": "w8a8"}]
    for count, each in enumerate(options, start=1):
        assert made(load(folder, cache=tmp_path, **each), tmp_path)
        assert len(cache_files(tmp_path)) == count
    for each in options:
        model = load(folder, cache=tmp_path, **each)
        assert not made(model, tmp_path)
        assert_same_model(model, load(folder, **each))


def cut_short(file):
    os.truncate(file, file.stat().st_size // 2)


def emptied(file):
    os.truncate(file, 0)


def overwritten(file):
    file.write_bytes(b"\xff" * 1000)


def with_another_header_of_packed_weights(file):
    with TensorFile(file) as held:
        start = next(iter(held.tensors.values())).start
    content = bytearray(file.read_bytes())
    content[start : start + 8] = b"\xff" * 8
    file.write_bytes(content)


def with_a_tensor_renamed(file):
    content = file.read_bytes()
    file.write_bytes(content.replace(b"down_packed", b"dawn_packed", 1))


def with_a_bit_changed(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def with_two_tensors_exchanged(file):
    content = file.read_bytes()
    assert content.count(b"layers.0.") == content.count(b"layers.1.")
    swapped = content.replace(b"layers.0.", b"layers.X.").replace(b"layers.1.", b"layers.0.")
    file.write_bytes(swapped.replace(b"layers.X.", b"layers.1."))


def with_other_checksums(file):
    content = file.read_bytes()
    start = content.index(b"checksums")
    file.write_bytes(content[: start + 20] + b"0" + content[start + 21 :])


def without_checksums(file):
    file.write_bytes(file.read_bytes().replace(b'"checksums"', b'"checksumz"', 1))


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        emptied,
        overwritten,
        with_another_header_of_packed_weights,
        with_a_tensor_renamed,
        with_a_bit_changed,
        with_two_tensors_exchanged,
        with_other_checksums,
        without_checksums,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_cache_is_replaced(models, tmp_path, damage, caplog):
    folder = models.quantized("qwen3_moe")
    load(folder, cache=tmp_path)
    [file] = cache_files(tmp_path)
    whole = file.read_bytes()
    file.chmod(0o644)
    damage(file)
    assert file.read_bytes() != whole
    assert_same_model(load(folder, cache=tmp_path), load(folder))
    assert file.read_bytes() == whole and f"{file.name}" in caplog.text


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_bit_of_a_cache_can_change_unseen(models, tmp_path, place, bit):
    folder, cache = models.quantized("qwen3_moe"), tmp_path / "cache"
    load(folder, cache=cache)
    [file] = cache_files(cache)
    whole = file.read_bytes()
    content = bytearray(whole)
    content[int(place * len(content))] ^= 1 << bit
    file.chmod(0o644)
    file.write_bytes(content)
    model = load(folder, cache=cache)
    assert file.read_bytes() == whole or not made(model, cache)  # one bit of the header's blanks may differ
    assert_same_model(model, load(folder))


def test_a_cache_of_a_source_that_was_rewritten_with_its_old_size_and_time_is_not_used(models, tmp_path):
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model")
    load(folder, cache=tmp_path / "cache")
    file = folder / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors[f"{EXPERT}.weight_scale"] *= 3
    content = save(tensors, {"format": "pt"})
    with file.open("r+b") as same_inode:
        same_inode.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    model = load(folder, cache=tmp_path / "cache")
    assert made(model, tmp_path / "cache")
    assert_same_model(model, load(folder))


def test_a_source_that_changes_while_it_is_loaded_is_refused(models, tmp_path, monkeypatch):
    folder = changed(models.quantized("qwen3_moe"), tmp_path / "model")
    read = TensorFile.read_into

    def read_and_change(self, *arguments):
        with self.path.open("r+b") as file:
            file.write(file.read(8))  # what was there before; that is not known to who reads
        return read(self, *arguments)

    monkeypatch.setattr(TensorFile, "read_into", read_and_change)
    with pytest.raises(CheckpointError, match="model.safetensors was changed while it was read; load it again"):
        load(folder, cache=tmp_path / "cache")
    assert not cache_files(tmp_path / "cache")


def test_a_cache_can_be_read_and_not_written(models, tmp_path):
    folder = models.quantized("qwen3_moe")
    load(folder, cache=tmp_path)
    [file] = cache_files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    file.chmod(0o644)
    os.truncate(file, 100)
    load(folder, cache=tmp_path)  # it is replaced, with its permissions
    assert stat.S_IMODE(file.stat().st_mode) == 0o444


CUT_WHILE_MAPPED = """
import faulthandler, os, pathlib, sys, torch, cpumoe
if sys.argv[3] == "faulthandler":
    faulthandler.enable()
cpumoe.load_model(sys.argv[1], cache=sys.argv[2], dtype=torch.float32)
model = cpumoe.load_model(sys.argv[1], cache=sys.argv[2], dtype=torch.float32)
[file] = pathlib.Path(sys.argv[2]).iterdir()
file.chmod(0o644)
os.truncate(file, 100)
model(torch.tensor([[1, 2, 3]]))
print("went on")
"""


@pytest.mark.parametrize("handler", first_of(["none", "faulthandler"], 1))
def test_a_cache_that_is_cut_while_it_is_used_ends_the_process_with_a_sentence(models, tmp_path, handler):
    arguments = [sys.executable, "-c", CUT_WHILE_MAPPED, models.quantized("qwen3_moe"), tmp_path / "cache", handler]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    [file] = cache_files(tmp_path / "cache")
    assert done.returncode == 2 and not done.stdout
    assert f"cpumoe: {file} was cut short while it was in use" in done.stderr and "Start again" in done.stderr


OTHER_BUS_ERRORS = """
import faulthandler, mmap, os, pathlib, signal, sys, torch, cpumoe
if sys.argv[3] == "faulthandler":
    faulthandler.enable()
for _ in range(2):
    model = cpumoe.load_model(sys.argv[1], cache=sys.argv[2], dtype=torch.float32)
if sys.argv[4] == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
other = pathlib.Path(sys.argv[2]) / "other"
other.write_bytes(bytes(20000))
with other.open("rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(other, 10)
print(mapped[15000])
"""


@pytest.mark.full
@pytest.mark.parametrize("handler", ["none", "faulthandler"])
@pytest.mark.parametrize("way", ["sent", "another file"])
def test_other_bus_errors_are_none_of_ours(models, tmp_path, handler, way):
    folder = models.quantized("qwen3_moe")
    arguments = [sys.executable, "-c", OTHER_BUS_ERRORS, folder, tmp_path / "cache", handler, way]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGBUS and "cut short" not in done.stderr
    assert ("Fatal Python error: Bus error" in done.stderr) == (handler == "faulthandler")


def test_a_cache_that_cannot_be_written_does_not_stop_the_load(models, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model = load(models.quantized("qwen3_moe"), cache=tmp_path / "file" / "cache")
    assert "could not be written" in caplog.text
    assert_same_model(model, load(models.quantized("qwen3_moe")))


def test_a_cache_is_for_the_native_backend(models, tmp_path, monkeypatch, caplog):
    folder = models.quantized("qwen3_moe")
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    model = load(folder, cache=tmp_path)
    assert model.model.layers[0].mlp.experts.backend.name == "reference"
    assert not cache_files(tmp_path) and "it is for weights of the native backend" in caplog.text
    monkeypatch.delenv("CPUMOE_BACKEND")
    load(folder, cache=tmp_path)
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    with pytest.raises(cpumoe.NoBackend, match="packed weights are for the native backend"):
        load(folder, cache=tmp_path)


def test_a_model_on_the_reference_backend_survives_saving(models, tmp_path, monkeypatch):
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    load(models.quantized("gpt_oss")).save_pretrained(tmp_path / "saved")
    monkeypatch.delenv("CPUMOE_BACKEND")
    assert_same_model(load(tmp_path / "saved"), load(models.quantized("gpt_oss")))


def test_gradients_are_refused_and_not_lost(tmp_path):
    folder = write_float(tmp_path / "float", "qwen3_moe")
    model = cpumoe.load_model(folder, scheme="w4a8-g32", linears="w8a8", dtype=torch.float32)
    assert not any(p.requires_grad for p in model.parameters())
    ids = torch.randint(3, 100, (1, 5))
    assert not model(ids).logits.requires_grad
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    with pytest.raises(RuntimeError, match="for inference"):
        model(inputs_embeds=embeddings)
    stock = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="cpumoe-w4a8-g32")
    loss = stock(ids, labels=ids).loss  # a call alone asks for nothing
    with pytest.raises(RuntimeError, match="there is no gradient through packed experts"):
        loss.backward()
    stock.train()
    with pytest.raises(RuntimeError, match="for inference"):
        stock(ids)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.layers.1.self_attn.q_proj.weight"])
def test_acceleration_that_fails_names_the_module_and_changes_nothing(tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(write_float(tmp_path / "float", "qwen3_moe"), dtype=torch.float32)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = torch.nan
    with pytest.raises(CheckpointError, match=name.rpartition(".")[0]):
        cpumoe.accelerate(model, "w4a8-g32", linears="w8a8")
    with torch.no_grad():
        model.get_parameter(name).copy_(state[name])
    assert model.state_dict().keys() == state.keys()
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
    assert all(parameter.requires_grad for parameter in model.parameters())
    cpumoe.accelerate(model, "w4a8-g32", linears="w8a8")  # as if nothing had happened
    assert model.is_quantized


def test_a_model_from_the_cache_is_pickled_once(tmp_path):
    folder = write_float(tmp_path / "float", "qwen3_moe")
    options = {"scheme": "w4a8-g32", "dtype": torch.float32, "cache": tmp_path / "cache"}
    cpumoe.load_model(folder, **options)
    model = cpumoe.load_model(folder, **options)
    packed = model.model.layers[0].mlp.experts.get_buffer("down_packed")
    assert packed.untyped_storage().nbytes() == packed.numel()


#: A model, variables, and what accelerate says.
BAD_ENVIRONMENTS = [
    ("qwen3_moe", {"CPUMOE_KV_CACHE": "int7"}, "CPUMOE_KV_CACHE='int7'; 'int8'"),
    ("qwen3_moe", {"CPUMOE_STEPS": "2"}, "CPUMOE_STEPS='2'; 0 "),
    ("qwen3_moe", {"CPUMOE_STEPS": "0", "CPUMOE_KV_CACHE": "int8"}, "CPUMOE_STEPS=0. Nothing was packed"),
    ("minimax", {"CPUMOE_KV_CACHE": "int8"}, "has no q_proj. Nothing was packed"),
]


@pytest.mark.parametrize(("name", "variables", "match"), BAD_ENVIRONMENTS)
def test_accelerate_checks_the_environment_before_it_packs(name, variables, match, monkeypatch):
    model = tiny_model(name)
    before, tensors = logits(model), dict(model.state_dict())
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=match):
        cpumoe.accelerate(model, "w8a8", linears="w8a8")
    assert not packed_modules(model) and not getattr(model, "is_quantized", False)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(tensor.data_ptr() == tensors[key].data_ptr() for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), before)
    monkeypatch.undo()
    assert packed_modules(cpumoe.accelerate(model, "w8a8"))


def test_accelerate_says_that_it_has_packed_a_model_without_a_native_decoder(monkeypatch):
    """Only a comparison of the packed layers shows that Laguna has none."""
    model = tiny_model("laguna")
    monkeypatch.setenv("CPUMOE_KV_CACHE", "int8")
    with pytest.raises(ValueError, match="gives other numbers.*The model is packed and runs with a KV cache"):
        cpumoe.accelerate(model, "w8a8")
    assert model.is_quantized and packed_modules(model) and logits(model).isfinite().all()


def test_accelerate_takes_an_int8_cache(monkeypatch):
    """The router of AFMoE is around a linear, whose weights the check of the configuration has to draw."""
    monkeypatch.setenv("CPUMOE_KV_CACHE", "int8")
    assert holds_records(cpumoe.accelerate(tiny_model("afmoe"), "w8a8"))
