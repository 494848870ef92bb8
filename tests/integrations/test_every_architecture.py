"""Every mixture-of-experts architecture that transformers has: found, packed, run, quantised, saved and read again."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from every_architecture import FAMILIES, family_class, logits_of, representatives_first, tiny_model, write_family
from random_layers import relative_error
from torch import nn

import cpumoe
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import Buffers
from cpumoe.checkpoints.loading import experts_of
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.integrations.transformers.layout.expert_modules import Role, describe_experts, expert_modules, marks_of
from cpumoe.integrations.transformers.layout.model_description import describe_model
from cpumoe.integrations.transformers.loading.special_experts import wrapped
from cpumoe.layers.experts import Experts

#: transformers itself cannot load these from a folder with their own class: it reads the file as the whole model's.
NOT_LOADED_ALONE = {"mistral_large4_text"}
LOADED = [name for name in FAMILIES if name not in NOT_LOADED_ALONE]
#: The text part of a model that is here as a whole has the same classes; what takes long is done for one of them.
ONE_OF_EACH = [
    name for name in LOADED if name.removesuffix("_text") == name or name.removesuffix("_text") not in LOADED
]
IDS = torch.randint(3, 98, (2, 12), generator=torch.Generator().manual_seed(0))


def packed_experts(model: nn.Module) -> list[Experts]:
    """Of every module that has experts; two modules may share theirs."""
    modules = (module for _, module in model.named_modules(remove_duplicate=False))
    return [module for module in modules if isinstance(module, Experts)]


def assert_nothing_is_left(model: nn.Module, count: int) -> None:
    """All experts are packed: none is left in float without a word."""
    assert not list(expert_modules(model))
    assert len(packed_experts(model)) == count > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_experts_module_is_described_and_packed_within_three_percent(name):
    model = tiny_model(name)
    for path, module in expert_modules(model):
        kind = describe_experts(module)
        packed = Experts.quantize(
            *kind.matrices(module),
            "w8a8",
            gate_up_bias=kind.biases(module)[0],
            down_bias=kind.biases(module)[1],
            activation=kind.shape.activation,
            interleaved=kind.interleaved,
        )
        if kind.marks.arguments == 1:  # called with tokens alone: whole models tell
            continue
        x = torch.randn(24, kind.shape.hidden_size)
        total = kind.shape.expert_count + (4 if kind.marks.role is Role.WITH_IDENTITIES else 0)
        ids = torch.stack([torch.randperm(total)[:2] for _ in x])
        weights = torch.rand(24, 2)
        shaped = x.view(2, 12, -1) if kind.marks.role is Role.KEEPING_SEQUENCES else x
        with torch.no_grad():
            expected = module(shaped, ids, weights)
            found = wrapped(marks_of(module), module, packed)(shaped, ids, weights)
        assert found.shape == expected.shape
        assert relative_error(found, expected) < 0.03, path


@pytest.mark.parametrize("name", representatives_first(LOADED))
def test_every_tensor_of_a_checkpoint_has_its_place(family_folder, name):
    model = tiny_model(name)
    with Checkpoint.open(family_folder(name)) as checkpoint:
        layout = describe_model(model, checkpoint)
        sources = experts_of(checkpoint, layout)
        assert len(sources) == len(list(expert_modules(model))) > 0
        check = TensorCheck(checkpoint)
        check_model(layout, sources.values(), quantized_linears(checkpoint, layout), check)
        check.raise_problems()
        for source in sources.values():
            kind = describe_experts(model.get_submodule(source.layout.module))
            gate_up, down = kind.matrices(model.get_submodule(source.layout.module))
            if kind.interleaved:
                gate_up = torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), 1)
            for chunk in ((0, 3), (3, kind.shape.expert_count - 3)):
                read = source.read_float(*chunk, Buffers())
                some = slice(chunk[0], sum(chunk))
                assert torch.equal(read[0], gate_up[some]) and torch.equal(read[1], down[some])


@pytest.mark.parametrize("name", representatives_first(ONE_OF_EACH))
def test_a_model_is_loaded_packed_saved_and_loaded_again(family_folder, tmp_path, name):
    folder, family = family_folder(name), family_class(name)
    original = tiny_model(name)
    expected, count = logits_of(original, name, IDS), len(list(expert_modules(original)))
    in_float = cpumoe.load_model(folder, dtype=torch.float32, auto_class=family)
    assert_nothing_is_left(in_float, count)
    assert relative_error(logits_of(in_float, name, IDS), expected) < 1e-4

    packed = cpumoe.load_model(folder, scheme="w8a8", dtype=torch.float32, auto_class=family)
    assert_nothing_is_left(packed, count)
    found = logits_of(packed, name, IDS)
    assert torch.isfinite(found).all()
    assert torch.equal(logits_of(cpumoe.accelerate(original, "w8a8"), name, IDS), found)
    if FAMILIES[name].generates:
        assert packed.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 15)
    packed.save_pretrained(tmp_path / "packed")
    again = family.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    assert_nothing_is_left(again, count)
    assert torch.equal(logits_of(again, name, IDS), found)

    in_float.save_pretrained(tmp_path / "float")  # a checkpoint that transformers reads alone
    plain = family.from_pretrained(tmp_path / "float", dtype=torch.float32).eval()
    assert not packed_experts(plain)
    assert relative_error(logits_of(plain, name, IDS), expected) < 1e-5


@pytest.mark.parametrize("name", representatives_first(name for name in ONE_OF_EACH if name != "diffusion_gemma"))
def test_a_model_is_quantised_from_disk_to_disk(family_folder, tmp_path, name):
    folder, family = family_folder(name), family_class(name)
    cpumoe.quantize_checkpoint(folder, tmp_path / "q", "w8a8", linears="float")
    one = cpumoe.load_model(tmp_path / "q", dtype=torch.float32, auto_class=family)
    two = family.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    original = tiny_model(name)
    assert_nothing_is_left(one, len(list(expert_modules(original))))
    assert torch.equal(logits_of(one, name, IDS), logits_of(two, name, IDS))
    with torch.no_grad():
        for module, float_module in zip(packed_experts(one), (m for _, m in expert_modules(original)), strict=True):
            matrices = describe_experts(float_module).matrices(float_module)
            for held, weight in zip((module.quantized().gate_up, module.quantized().down), matrices, strict=True):
                rounded = cpumoe.layers.reference.dequantize(held)
                if describe_experts(float_module).interleaved and weight is matrices[0]:
                    weight = torch.cat((weight[:, 0::2], weight[:, 1::2]), 1)
                assert relative_error(rounded, weight) < 0.01


def test_experts_that_two_modules_share_are_not_quantised_from_disk_to_disk(family_folder, tmp_path):
    with pytest.raises(cpumoe.UnsupportedScheme, match=r"have the same experts.*load_model"):
        cpumoe.quantize_checkpoint(family_folder("diffusion_gemma"), tmp_path / "q", "w8a8")


#: Families whose experts transformers has not marked with use_experts_implementation.
UNMARKED = {"dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash", "step3p7", "step3p7_text"}
MARKED = [name for name in ONE_OF_EACH if name not in UNMARKED]


@pytest.mark.parametrize("name", representatives_first(MARKED))
def test_experts_implementation_gives_the_bits_of_packed_experts(family_folder, name):
    model = (
        family_class(name)
        .from_pretrained(family_folder(name), experts_implementation="cpumoe-w8a8", dtype=torch.float32)
        .eval()
    )
    packed = cpumoe.accelerate(tiny_model(name), "w8a8")
    for path, module in expert_modules(model):
        kind = describe_experts(module)
        x, ids = torch.randn(9, kind.shape.hidden_size), torch.randint(kind.shape.expert_count, (9, 2))
        weights = torch.rand(9, 2)
        with torch.no_grad():
            assert torch.equal(module(x, ids, weights), packed.get_submodule(path)(x, ids, weights))
    assert torch.isfinite(logits_of(model, name, IDS)).all()


def test_no_class_of_experts_is_new():
    """Fails with the names of classes that nobody has looked at: give them a tiny model, and see that it is served."""
    modules = [(name, module) for name in FAMILIES for _, module in expert_modules(tiny_model(name))]
    assert {name for name, module in modules if not hasattr(module, "has_gate")} == UNMARKED
    looked_at = {type(module).__name__ for _, module in modules}
    found = set()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text()
        found |= set(re.findall(r"^@use_experts_implementation\b[^\n]*\nclass (\w+)", source, re.MULTILINE))
    assert len(found) > 50
    assert found <= looked_at, f"not looked at: {sorted(found - looked_at)}"


def test_the_marks_that_transformers_leaves_are_still_those_that_are_known():
    moe = importlib.import_module("transformers.integrations.moe")
    known = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}
    assert set(inspect.signature(moe.use_experts_implementation).parameters) == known | {"has_post_expert_norm"}


_GRID = torch.tensor([[1, 4, 4]])
_PATCHES = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
_IN_GRIDS = "qwen3_vl_moe qwen3_5_moe qwen4_exp qwen3_omni_moe_thinker glm4v_moe glm5_next minimax_m3_vl"
#: Family -> what its model takes for an image, which becomes four tokens.
IMAGES = {
    **{name: {"pixel_values": _PATCHES, "image_grid_thw": _GRID} for name in _IN_GRIDS.split()},
    "llama4": {"pixel_values": _PATCHES.flatten()[: 3 * 16 * 16].view(1, 3, 16, 16)},
    "mistral4": {
        "pixel_values": _PATCHES.flatten()[: 3 * 16 * 16].view(1, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]]),
    },
}


@pytest.mark.full
@pytest.mark.parametrize("name", IMAGES)
def test_images_go_into_models_whose_experts_are_packed(family_folder, name):
    model = cpumoe.load_model(family_folder(name), dtype=torch.float32, auto_class=family_class(name))
    original = tiny_model(name)
    assert_nothing_is_left(model, len(list(expert_modules(original))))
    config = original.config
    token = getattr(config, "image_token_id", None)
    token = config.image_token_index if token is None else token
    ids = torch.tensor([[5, 6, token, token, token, token, 7, 8]])
    more = {"mm_token_type_ids": (ids == token).long()} if _takes(original, "mm_token_type_ids") else {}
    with torch.no_grad():
        found, expected = (m(input_ids=ids, **IMAGES[name], **more).logits for m in (model, original))
        without = original(input_ids=IDS[:1, :8]).logits
    assert relative_error(found, expected) < 1e-4
    assert not torch.allclose(expected, without)


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def test_shared_experts_with_as_many_rows_as_there_are_experts_are_no_routers(tmp_path):
    folder = write_family(tmp_path / "m", "qwen3_next", num_experts=32, shared_expert_intermediate_size=32)
    cpumoe.quantize_checkpoint(folder, tmp_path / "q", "w8a8")
    loaded = cpumoe.load_model(tmp_path / "q"), cpumoe.load_model(folder, scheme="w8a8", linears="w8a8")
    for model in loaded:
        block = model.model.layers[1].mlp
        shared = block.shared_expert
        for linear in (shared.gate_proj, shared.up_proj, shared.down_proj):
            assert isinstance(linear, cpumoe.QuantizedLinear)
        assert isinstance(block.shared_expert_gate, nn.Linear)


@pytest.mark.parametrize("limit", [0.5, 7.0, 24.0, 100.0, 2000.0])
def test_limits_of_activations_are_seen_wherever_they_are(limit):
    (_, module), *_ = expert_modules(tiny_model("deepseek_v4", swiglu_limit=limit))
    activation = describe_experts(module).shape.activation
    assert activation.name == "swiglu_step" and activation.limit == pytest.approx(limit)
    assert activation.gate_limit == pytest.approx(float(nn.functional.silu(torch.tensor(limit))), rel=1e-6)


@pytest.mark.parametrize("name", ["jetmoe", "qwen3_omni_moe", "deepseek_v4"])
def test_experts_keep_their_scheme_beside_linears_of_another(family_folder, tmp_path, name):
    cpumoe.quantize_checkpoint(family_folder(name), tmp_path / "q", "w4a8-g32", linears="w8a8")
    model = cpumoe.load_model(tmp_path / "q", dtype=torch.float32, auto_class=family_class(name))
    assert {str(experts.config.scheme) for experts in packed_experts(model)} == {"w4a8-g32"}
    linears = [module for module in model.modules() if isinstance(module, cpumoe.QuantizedLinear)]
    assert {str(linear.scheme) for linear in linears} == {"w8a8"}
