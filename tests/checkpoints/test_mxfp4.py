"""gpt-oss in its native MXFP4 files: read as they are, right against plain arithmetic, and refused when damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_architectures import write_float, write_tensors
from torch import Tensor

from cpumoe import CheckpointError, Experts, UnsupportedScheme, cli
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.expert_sources import Buffers
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.mxfp4 import Mxfp4, Mxfp4Storage
from cpumoe.checkpoints.fused_sources import FusedQuantized
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.scheme import Scheme

Tensors = dict[str, Tensor]

EXPERTS = "model.layers.0.mlp.experts"
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
COUNT, HIDDEN, INNER = 5, 96, 160  # rows of 3 and of 5 blocks

#: The values of the codes 0 to 15.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def random_experts(prefix: str = EXPERTS, count: int = COUNT, hidden: int = HIDDEN, inner: int = INNER) -> Tensors:
    """The six tensors of a layer; weights of the size that trained ones have."""
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        tensors[f"{prefix}.{name}_blocks"] = random_bytes(count, rows, columns // 32, 16)
        tensors[f"{prefix}.{name}_scales"] = random_bytes(count, rows, columns // 32, low=120, high=125)
        tensors[f"{prefix}.{name}_bias"] = torch.randn(count, rows, dtype=torch.bfloat16)
    return tensors


def write_experts(folder: Path, tensors: Tensors, shards: int = 1, **config: Any) -> Path:
    """A folder with one layer of experts and nothing else; sizes are those of the tensors where they fit."""
    folder.mkdir(exist_ok=True)
    write_tensors(folder, tensors, shards)
    sizes = {"num_local_experts": COUNT, "hidden_size": HIDDEN, "intermediate_size": INNER}
    section = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    model = {"model_type": "gpt_oss", "num_hidden_layers": 1, "num_experts_per_tok": 2, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(model | sizes | config))
    return folder


def load(folder: Path, module: str = EXPERTS) -> Experts:
    with Checkpoint.open(folder) as checkpoint:
        return load_experts(experts_of(checkpoint, describe(checkpoint))[module])


def plain_weight(tensors: Tensors, name: str, prefix: str = EXPERTS) -> Tensor:
    """[experts, rows, columns] in fp64, value by value from the definition."""
    blocks, scales = tensors[f"{prefix}.{name}_blocks"], tensors[f"{prefix}.{name}_scales"]
    values = torch.empty((*blocks.shape[:3], 32), dtype=torch.float64)
    table = torch.tensor(E2M1, dtype=torch.float64)
    for place in range(16):
        values[..., 2 * place] = table[(blocks[..., place] & 15).long()]
        values[..., 2 * place + 1] = table[(blocks[..., place] >> 4).long()]
    powers: Tensor = 2.0 ** (scales.to(torch.float64) - 127)
    return (values * powers.unsqueeze(-1)).flatten(2)


def plain_experts(tensors: Tensors, x: Tensor, ids: Tensor, weights: Tensor, prefix: str = EXPERTS) -> Tensor:
    """gpt-oss' experts token by token in fp64; gate rows are the even ones."""
    gate_up, down = (plain_weight(tensors, name, prefix) for name in ("gate_up_proj", "down_proj"))
    gate_up_bias, down_bias = (tensors[f"{prefix}.{name}_proj_bias"].double() for name in ("gate_up", "down"))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        h = gate_up[expert] @ x[token].double() + gate_up_bias[expert]
        gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
        inside = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        out[token] += weights[token, slot].double() * (down[expert] @ inside + down_bias[expert])
    return out


def routed(tokens: int, hidden: int = HIDDEN, count: int = COUNT) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.rand(tokens, count).topk(2)
    return torch.randn(tokens, hidden), ids, weights / weights.sum(-1, keepdim=True)


def difference(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


# ---- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 4])
def test_experts_compute_what_the_files_say(shards: int, tmp_path: Path) -> None:
    tensors = random_experts()
    experts = load(write_experts(tmp_path / "m", tensors, shards))
    assert str(experts.config.scheme) == "mxfp4a16"
    for tokens in (1, 9):
        inputs = routed(tokens)
        assert difference(experts(*inputs), plain_experts(tensors, *inputs)) < 2e-4


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its own conversion and its own experts, in fp32: neither the layout nor the arithmetic is ours."""
    from transformers import AutoConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    tensors = random_experts()
    sizes = {"num_local_experts": COUNT, "hidden_size": HIDDEN, "intermediate_size": INNER}
    theirs = GptOssExperts(AutoConfig.for_model("gpt_oss", **sizes, experts_implementation="eager"))
    inputs = routed(9)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = tensors[f"{EXPERTS}.{name}_blocks"], tensors[f"{EXPERTS}.{name}_scales"]
            getattr(theirs, name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            getattr(theirs, f"{name}_bias").copy_(tensors[f"{EXPERTS}.{name}_bias"])
        truth = theirs(*inputs)
    assert difference(load(write_experts(tmp_path / "m", tensors))(*inputs), truth.double()) < 2e-4


def test_a_layer_that_is_computed_by_hand(tmp_path: Path) -> None:
    """One expert with one weight in gate, up and down each: which row, which input and which scale show in the sum."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_experts(count=1).items()}
    gate_up, gate_up_scales, down, down_scales = (
        tensors[f"{EXPERTS}.{name}"]
        for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
    )
    gate_up_scales.fill_(127), down_scales.fill_(127)
    gate_up[0, 2 * 7, 1, 3] = 0x05  # gate 7: 3 times input 32 + 6, the low nibble
    gate_up_scales[0, 2 * 7, 1] = 126  # halved
    gate_up[0, 2 * 7 + 1, 2, 0] = 0xC0  # up 7: -2 times input 64 + 1, the high nibble
    down[0, 11, 0, 3] = 0x70  # output 11: 6 times the 7th
    down_scales[0, 11, 0] = 129  # times four
    tensors[f"{EXPERTS}.down_proj_bias"][0, 12] = 0.25
    x = torch.zeros(1, HIDDEN)
    x[0, 38], x[0, 65] = 1.0, 0.75
    gate, up = 3 * 0.5 * 1.0, -2 * 0.75
    inside = (up + 1) * gate / (1 + 2.718281828459045 ** (-1.702 * gate))
    expected = torch.zeros(1, HIDDEN, dtype=torch.float64)
    expected[0, 11], expected[0, 12] = 6 * 4 * inside, 0.25
    folder = write_experts(tmp_path / "m", tensors, num_local_experts=1, num_experts_per_tok=1)
    found = load(folder)(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_packed_to_the_bit(data: st.DataObject, tmp_path: Path) -> None:
    count, hidden, inner = (data.draw(st.integers(1, most)) for most in (9, 4, 4))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = random_experts(EXPERTS, count, 32 * hidden, 32 * inner)
    for name in tensors:
        if name.endswith("_scales"):
            tensors[name] = random_bytes(*tensors[name].shape, high=255)
    sizes = {"num_local_experts": count, "hidden_size": 32 * hidden, "intermediate_size": 32 * inner}
    folder = write_experts(tmp_path / "m", tensors, **sizes, num_experts_per_tok=1)
    packed = load(folder).quantized()
    for weight, name in ((packed.gate_up, "gate_up_proj"), (packed.down, "down_proj")):
        blocks, scales, bias = (tensors[f"{EXPERTS}.{name}_{part}"] for part in ("blocks", "scales", "bias"))
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
        for found, stored in ((weight.values.view(torch.uint8), codes), (weight.scales, scales), (weight.bias, bias)):
            if name == "gate_up_proj":
                stored = torch.cat((stored[:, 0::2], stored[:, 1::2]), 1)
            assert found is not None
            assert torch.equal(found, stored.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_biases_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {n: t.to(dtype) if n.endswith("_bias") else t for n, t in random_experts().items()}
    inputs = routed(3)
    found = load(write_experts(tmp_path / "m", tensors))(*inputs)
    assert difference(found, plain_experts(tensors, *inputs)) < 2e-4


def test_blocks_are_read_where_they_are_packed_from(tmp_path: Path) -> None:
    """Neither the whole tensor nor a copy of a part is made: a checkpoint may have 60 GB of them."""
    tensors = random_experts()
    with Checkpoint.open(write_experts(tmp_path / "m", tensors)) as checkpoint:
        (source,) = experts_of(checkpoint, describe(checkpoint)).values()
        assert isinstance(source, FusedQuantized)
        buffers = Buffers()
        part = source.read(1, 3, buffers)
        of_blocks = buffers.get(f"{EXPERTS}.gate_up_proj_blocks", (3, 2 * INNER, HIDDEN // 32, 16), torch.uint8)
        assert part.interleaved and part.count == 3
        assert part.gate_up.values.data_ptr() == of_blocks.data_ptr()
        assert torch.equal(part.down.values, tensors[f"{EXPERTS}.down_proj_blocks"][1:4].flatten(2))
        per_expert = 3 * HIDDEN * INNER * 17 // 32
        assert source.expert_bytes == per_expert


def test_storage_of_one_linear() -> None:
    storage = Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4")
    tensors = {"blocks": random_bytes(6, 3, 16), "scales": random_bytes(6, 3)}
    plain = storage.decode_plainly(tensors)
    assert plain.values.shape == (6, 96) and plain.values.min() >= 0 and plain.values.max() <= 15
    for name, tensor in storage.encode(plain).items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(storage.decode(tensors, 6, 96).plain().values, plain.values)


# ---- refused ---------------------------------------------------------------------------------------------------------


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{EXPERTS}.{name}": change(tensors[f"{EXPERTS}.{name}"]).contiguous()})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{EXPERTS}.{name}")


#: What is wrong -> how it comes about, and what the message must say.
DAMAGES: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "no scales": (without("down_proj_scales"), ("1 missing", "down_proj_scales")),
    "no blocks": (without("gate_up_proj_blocks"), ("1 missing", "gate_up_proj_blocks")),
    "no bias": (without("gate_up_proj_bias"), ("1 missing", "gate_up_proj_bias")),
    "nothing": (dict.clear, ("gate_up_proj_blocks",)),
    "one expert less": (
        changed("down_proj_blocks", lambda t: t[1:]),
        ("down_proj_blocks is U8 [4, 96, 5, 16]", "U8 [5, 96, 5, 16]"),
    ),
    "blocks of 16": (
        changed("gate_up_proj_blocks", lambda t: t.view(5, 320, 6, 8)),
        ("gate_up_proj_blocks is U8 [5, 320, 6, 8]", "U8 [5, 320, 3, 16]"),
    ),
    "blocks of 16 with scales": (
        lambda tensors: (
            changed("gate_up_proj_blocks", lambda t: t.view(5, 320, 6, 8))(tensors),
            changed("gate_up_proj_scales", lambda t: t.repeat_interleave(2, -1))(tensors),
        ),
        ("2 of another kind", "gate_up_proj_blocks is U8 [5, 320, 6, 8]", "gate_up_proj_scales is U8 [5, 320, 6]"),
    ),
    "rows that are not in blocks": (
        changed("down_proj_blocks", lambda t: t.flatten(2)),
        ("down_proj_blocks is U8 [5, 96, 80]", "U8 [5, 96, 5, 16]"),
    ),
    "transposed": (
        changed("gate_up_proj_blocks", lambda t: t.transpose(1, 2)),
        ("gate_up_proj_blocks is U8 [5, 3, 320, 16]",),
    ),
    "signed blocks": (changed("down_proj_blocks", lambda t: t.view(torch.int8)), ("down_proj_blocks is I8",)),
    "blocks in float": (changed("down_proj_blocks", Tensor.float), ("down_proj_blocks is F32",)),
    "scales in float": (changed("down_proj_scales", Tensor.bfloat16), ("down_proj_scales is BF16",)),
    "biases in integers": (changed("down_proj_bias", Tensor.int), ("down_proj_bias is I32", "BF16 or F16 or F32")),
    "a bias for all experts": (changed("down_proj_bias", lambda t: t[0]), ("down_proj_bias is BF16 [96]", "[5, 96]")),
    "float weights beside": (
        lambda tensors: tensors.update({f"{EXPERTS}.down_proj": torch.zeros(COUNT, INNER, HIDDEN)}),
        ("1 unexpected", "experts.down_proj"),
    ),
    "zero points beside": (
        lambda tensors: tensors.update({f"{EXPERTS}.down_proj_zeros": torch.zeros(3)}),
        ("1 unexpected", "down_proj_zeros"),
    ),
    "one expert's own": (
        lambda tensors: tensors.update({f"{EXPERTS}.3.down_proj.weight": torch.zeros(HIDDEN, INNER)}),
        ("1 unexpected", "experts.3.down_proj.weight"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_experts_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    change, said = DAMAGES[damage]
    tensors = random_experts()
    change(tensors)
    with (
        Checkpoint.open(write_experts(tmp_path / "m", tensors)) as checkpoint,
        pytest.raises(CheckpointError) as refusal,
    ):
        experts_of(checkpoint, describe(checkpoint))
    for text in said:
        assert text in str(refusal.value)


@pytest.mark.parametrize(("name", "index"), [("gate_up", (0, 0, 0)), ("gate_up", (4, 319, 2)), ("down", (3, 95, 4))])
def test_a_scale_that_is_nan(name: str, index: tuple[int, int, int], tmp_path: Path) -> None:
    tensors = random_experts()
    tensors[f"{EXPERTS}.{name}_proj_scales"][index] = 255
    place = f"{EXPERTS}: {name}: scale at {list(index)} has the code 255, which is NaN; 0 to 254 are accepted"
    with pytest.raises(CheckpointError) as refusal:
        load(write_experts(tmp_path / "m", tensors))
    assert place in str(refusal.value)


def test_a_refused_load_reads_no_further(tmp_path: Path) -> None:
    """The next experts are read while some are packed; nothing may be read any more when the refusal is seen."""
    tensors = random_experts()
    tensors[f"{EXPERTS}.gate_up_proj_scales"][0, 0, 0] = 255
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="which is NaN") as refusal:
        load(write_experts(tmp_path / "m", tensors))
    assert refusal.value.__traceback__ is not None  # holds the frames of the load
    assert threading.active_count() == before


@pytest.mark.parametrize("sizes", [{"hidden_size": 128}, {"intermediate_size": 96}, {"num_local_experts": 6}])
def test_sizes_of_another_model(sizes: dict[str, int], tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "m", random_experts(), **sizes)
    said = r"of another kind: .*gate_up_proj_blocks is U8 \[5, 320, 3, 16\]"
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=said):
        experts_of(checkpoint, describe(checkpoint))


@pytest.mark.parametrize("model", [{"model_type": "llama4_text"}, {"model_type": "mixtral"}])
def test_another_architecture_is_refused(model: dict[str, str], tmp_path: Path) -> None:
    """No file says in which order another model's gate and up would lie: better no answer than a guess."""
    folder = write_experts(tmp_path / "m", random_experts(), **model)
    said = f"'mxfp4'.*{model['model_type']}.*for gpt_oss they are"
    with Checkpoint.open(folder) as checkpoint, pytest.raises(UnsupportedScheme, match=said):
        experts_of(checkpoint, describe(checkpoint))


# ---- quantization_config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "float_layers"),
    [
        (None, ()),
        ([], ()),
        (NOT_CONVERTED, ()),
        (["model.layers.1.mlp.experts"], (1,)),
        (["model.layers.1"], (1,)),  # whole parts of a name: not layer 11
        (["layers.1.mlp.experts", "layers.2.mlp.experts"], (1, 2)),  # the end of a name
        (["experts"], (1, 2, 11)),
        (["model.layers.*.mlp"], (1, 2, 11)),
        (["mlp.experts.gate_up_proj"], ()),
    ],
)
def test_modules_that_are_left_in_float(names: list[str] | None, float_layers: tuple[int, ...]) -> None:
    """As transformers takes them."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    parsed = parse_quantization({"quant_method": "mxfp4", "modules_to_not_convert": names})
    assert isinstance(parsed, Mxfp4) and [*map(str, parsed.schemes)] == ["mxfp4a16"]
    for layer in (1, 2, 11):
        experts = f"model.layers.{layer}.mlp.experts"
        is_float = layer in float_layers
        assert should_convert_module(experts, names) is not is_float
        for name in (experts, f"{experts}.3.up_proj"):
            assert (parsed.storage_of(name) is None) is is_float
    for name in ("model.layers.1.self_attn.q_proj", "lm_head", "model.layers.1.mlp.router", "my_experts", ""):
        assert parsed.storage_of(name) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("lm_head", "modules_to_not_convert is 'lm_head'; a list of names is accepted"),
        ([3], "modules_to_not_convert is [3]"),
        (["("], "pattern"),
        ([f"({'a?' * 30})" + "{9000}{9000}"], "multiply"),
    ],
)
def test_bad_lists_of_modules(value: object, said: str, tmp_path: Path) -> None:
    section = {"quant_method": "mxfp4", "modules_to_not_convert": value}
    with Checkpoint.open(write_experts(tmp_path / "m", random_experts(), quantization_config=section)) as checkpoint:
        with pytest.raises(CheckpointError) as refusal:
            experts_of(checkpoint, describe(checkpoint))
        assert said in str(refusal.value)
        assert "quantization_config in config.json" in str(refusal.value)


# ---- whole models, as the commands meet them -------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two layers in bf16 whose experts are MXFP4."""
    folder = write_float(tmp_path / "model", "gpt_oss", dtype=torch.bfloat16, attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".experts." not in n}
    for layer in (0, 1):
        tensors |= random_experts(f"model.layers.{layer}.mlp.experts", 4, 64, 64)
    write_tensors(folder, tensors)
    return folder


def change_model(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_tensors(folder, tensors)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_knows_the_format(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = command(capsys, "inspect", str(model))
    assert code == 0 and facts["loads"] and facts["quantized"], facts["problems"]
    experts = facts["parts"][0]
    assert (experts["kind"], experts["scheme"], experts["format"]) == ("experts", "mxfp4a16", "mxfp4")
    assert (experts["modules"], experts["parameters"]) == (2, 2 * 4 * 3 * 64 * 64)
    assert all(part["scheme"] is None for part in facts["parts"][1:])


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "missing", "1.mlp.experts.down_proj_scales"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": random_bytes(4, 64, 4, 8)}),
            "wrong",
            "down_proj_blocks is U8 [4, 64, 4, 8], U8 [4, 64, 2, 16] is accepted",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": random_bytes(64, 64)}),
            "wrong",
            "q_proj.weight is U8 [64, 64]",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.gate_up_proj_blocks": random_bytes(4, 64, 2, 16)}),
            "unexpected",
            "self_attn.gate_up_proj_blocks",
        ),
    ],
)
def test_inspect_names_what_is_wrong(
    change: Callable[[Tensors], object], kind: str, said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_model(model, change)
    code, facts = command(capsys, "inspect", str(model))
    assert code != 0 and not facts["loads"]
    assert any(said in name for name in facts["problems"][kind]), facts["problems"]


def test_check_agrees(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = command(capsys, "check", str(model))
    assert code == 0 and facts["agrees"] and facts["modules"] == 2 and facts["warnings"] == 0


def test_check_names_a_scale_that_is_nan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][2, 11, 1] = 255  # an odd row: of up

    change_model(model, change)
    code, facts = command(capsys, "check", str(model))
    assert code != 0 and facts["differing"] == ["model.layers.1.mlp.experts"]
    problems = " ".join(facts["layers"][1]["modules"][0]["problems"])
    assert (
        "experts.2.up_proj.scales: 1 of 128 values are NaN" in problems and "gate_up: scale at [2, 11, 1]" in problems
    )


def test_check_notices_nibbles_in_the_wrong_order(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Mxfp4Storage.decode

    def swapped(storage: Mxfp4Storage, tensors: Tensors, rows: int, columns: int) -> Any:
        return right(storage, tensors | {"blocks": tensors["blocks"] << 4 | tensors["blocks"] >> 4}, rows, columns)

    monkeypatch.setattr(Mxfp4Storage, "decode", swapped)
    code, facts = command(capsys, "check", str(model))
    assert code != 0 and len(facts["differing"]) == 2


def test_a_layer_whose_experts_are_float(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = "model.layers.0.mlp.experts"

    def to_float(tensors: Tensors) -> None:
        for name in ("gate_up_proj", "down_proj"):
            weight = plain_weight(tensors, name, experts).transpose(1, 2)
            tensors[f"{experts}.{name}"] = weight.to(torch.bfloat16).contiguous()
            del tensors[f"{experts}.{name}_blocks"], tensors[f"{experts}.{name}_scales"]

    change_model(model, to_float)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(experts)
    (model / "config.json").write_text(json.dumps(config))
    code, facts = command(capsys, "inspect", str(model))
    assert code == 0, facts["problems"]
    assert [(part["scheme"], part["modules"]) for part in facts["parts"][:2]] == [(None, 1), ("mxfp4a16", 1)]
    with Checkpoint.open(model) as checkpoint:
        assert [str(source.config.scheme) for source in experts_of(checkpoint, describe(checkpoint)).values()] == [
            "bf16",
            "mxfp4a16",
        ]


def test_quantising_it_again_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "w4a8-g32"]) != 0
    assert "quantised already" in capsys.readouterr().err


def test_int8_activations_on_request(tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "model", random_experts())
    with Checkpoint.open(folder, "int8") as checkpoint:
        (source,) = experts_of(checkpoint, describe(checkpoint)).values()
        assert str(source.config.scheme) == "mxfp4a16+int8"
