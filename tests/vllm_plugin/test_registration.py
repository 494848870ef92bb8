"""How cpumoe gets into vLLM: what it takes over, when it stays away, and that vLLM starts in any case."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from conftest import run

import cpumoe
from cpumoe.integrations.vllm import registration, served_configs, symbols
from cpumoe_command.vllm_plugin import TESTED

_LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
_SHOW = (
    "from vllm.model_executor.layers.quantization import get_quantization_config\n"
    "print(get_quantization_config('compressed-tensors').__module__)\n"
)
_OURS, _THEIRS = "cpumoe.integrations.vllm.served_configs", "vllm.model_executor.layers.quantization."


def test_entry_point() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="cpumoe")
    assert found.value == "cpumoe_command.vllm_plugin:register"
    assert callable(found.load())


def test_takes_over_once() -> None:
    """Loaded again in the same process, and found by vLLM without an import."""
    printed = run("-c", _LOAD + "from cpumoe_command.vllm_plugin import register; register(); register()\n" + _SHOW)
    assert _OURS in printed
    assert "cannot be used" not in printed


def test_switched_off() -> None:
    printed = run("-c", _LOAD + _SHOW + "import sys; print('cpumoe' in sys.modules)", environment={"CPUMOE_VLLM": "0"})
    assert _THEIRS in printed
    assert printed.splitlines()[-1] == "False"


def test_unknown_switch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cpumoe_command.vllm_plugin import register; register()"],
        env={"CPUMOE_VLLM": "off", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "ValueError: CPUMOE_VLLM='off'; 0 (vLLM is left as it is) and 1 " in done.stderr


def test_mistyped_settings() -> None:
    """They stop vLLM, which would compute something else without a word."""
    for name, value in (("CPUMOE_ACTIVATIONS", "in8"), ("CPUMOE_SCHEME", "w4a8g128")):
        code = "from cpumoe_command.vllm_plugin import register; register()"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, name: value}, capture_output=True, text=True
        )
        assert done.returncode != 0
        assert f"{value!r}" in done.stderr.splitlines()[-1]


def test_another_version() -> None:
    change = "import vllm; vllm.__version__ = '9.9.9+cpu'\n"
    printed = run("-c", change + _LOAD + _SHOW)
    assert (
        f"cpumoe {cpumoe.__version__} was tried with vLLM 0.32.0, and this is 9.9.9, which it leaves as it is"
        in printed
    )
    assert _THEIRS in printed
    assert _OURS in run("-c", change + _LOAD + _SHOW, environment={"CPUMOE_VLLM": "1"})


def test_a_symbol_that_is_gone() -> None:
    change = "import vllm.model_executor.layers.linear as linear; del linear.QKVParallelLinear\n"
    printed = run("-c", change + _LOAD + _SHOW)
    gone = "vllm.model_executor.layers.linear.QKVParallelLinear"
    assert f"cpumoe leaves vLLM 0.32.0 as it is, which lacks {gone}" in printed
    assert _THEIRS in printed


def test_another_platform() -> None:
    change = "from vllm.platforms import current_platform; type(current_platform).is_cpu = lambda self: False\n"
    printed = run("-c", change + _LOAD + _SHOW + "import sys; print('cpumoe' in sys.modules)")
    assert _THEIRS in printed
    assert printed.splitlines()[-1] == "False"


def test_what_is_broken_does_not_break_vllm() -> None:
    """What is wrong is told in a sentence when it is met, and vLLM goes on."""
    printed = run("-c", "import sys; sys.modules['cpumoe._core'] = None\n" + _LOAD + _SHOW)
    assert "cpumoe cannot be used and leaves vLLM as it is: " in printed
    assert _THEIRS in printed


def test_all_symbols_are_there() -> None:
    """A version of vLLM without one of them is noticed here, by name."""
    assert vllm.__version__.partition("+")[0] in TESTED
    assert symbols.missing_symbols() == []


def test_all_imports_are_known() -> None:
    """What the plug-in imports of vLLM stands in the list that a start of vLLM is checked against."""
    used: set[tuple[str, str]] = set()
    for path in Path(registration.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                used |= {(node.module or "", alias.name) for alias in node.names}
    known = {(module, name.partition(".")[0]) for module, names in symbols.SYMBOLS.items() for name in names}
    assert used - known - {("vllm.platforms", "current_platform")} == set()


# ---- configurations --------------------------------------------------------------------------------------------------


def _section(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | changes
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "int-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"g": group},
        "ignore": [],
    }


def test_configurations_can_be_pickled(cases: dict[str, Any]) -> None:
    """vLLM hands them to its workers that way, with the names of the checkpoint's tensors in them."""
    names = "int-quantized w4a8-g32,GPTQ,AWQ,fp8 in blocks,ModelOpt NVFP4,AutoRound,gpt-oss mxfp4"
    for name in names.split(","):
        folder = cases[name]["folder"]
        section = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
        method = {"auto-round": "inc", "mxfp4": "gpt_oss_mxfp4"}.get(section["quant_method"], section["quant_method"])
        if section.get("quant_algo") == "NVFP4":
            method = "modelopt_fp4"
        config = served_configs._METHODS[method].from_config(section)  # type: ignore[attr-defined]
        config.maybe_update_config(folder)
        again = pickle.loads(pickle.dumps(config))
        assert type(again) is type(config)
        assert again._names == config._names
        assert again._names
        assert again._quantization is not None


def test_what_is_not_served_is_vllms(caplog: pytest.LogCaptureFixture, cases: dict[str, Any]) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    section = _section(num_bits=3)
    config = served_configs.CompressedTensors.from_config(section)
    stock = CompressedTensorsConfig.from_config(section)
    assert config._quantization is None
    assert config.get_supported_act_dtypes() == stock.get_supported_act_dtypes()
    assert config.target_scheme_map == stock.target_scheme_map
    assert config.get_checkpoint_weight_mapper() == stock.get_checkpoint_weight_mapper()


def test_models_without_experts_are_vllms(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"model.layers.0.mlp.down_proj.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    config = served_configs.CompressedTensors.from_config(_section())
    assert config._quantization is not None
    config.maybe_update_config(str(tmp_path))
    assert config._quantization is None
    section = _section(actorder="group") | {"format": "pack-quantized"}
    section["config_groups"]["g"] |= {"format": "pack-quantized", "input_activations": None}
    unknown = served_configs.CompressedTensors.from_config(section)
    with pytest.raises(cpumoe.UnsupportedScheme, match="does not serve this checkpoint .*, and vLLM does not know its"):
        unknown.maybe_update_config(str(tmp_path))


def test_names_that_a_model_class_changes(tmp_path: Path) -> None:
    """vLLM's rules are about tensors, some about how a name ends. A linear that no file has is left to vLLM."""
    import torch
    from safetensors.torch import save_file
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.utils import WeightsMapper

    linears = ("model.layers.0.attention.dense", "model.layers.0.mlp.experts.0.gate_proj", "lm_head")
    suffixes = {"weight": torch.zeros(32, 32, dtype=torch.int8), "weight_scale": torch.ones(32, 1)}
    held = {f"{name}.{suffix}": tensor for name in linears for suffix, tensor in suffixes.items()}
    save_file({name: tensor.clone() for name, tensor in held.items()}, tmp_path / "model.safetensors")
    config = served_configs.CompressedTensors.from_config(_section())
    config.maybe_update_config(str(tmp_path))
    rules = {".attention.dense.": ".self_attn.o_proj."}
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_substr=rules, orig_to_new_prefix={"lm_head.": "text.lm_head."}))
    (found,) = config._stored_linears("model.layers.0.self_attn.o_proj")
    assert found.name == linears[0]
    assert config._stored_linears("text.lm_head")[0].name == "lm_head"
    with pytest.raises(cpumoe.UnsupportedScheme, match="the files have no model.layers.0.self_attn.other"):
        config._stored_linears("model.layers.0.self_attn.other")
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    method = config.get_quant_method(layer, "model.layers.0.self_attn.other")
    assert type(method).__module__.startswith("vllm.")
    assert config._left == ["model.layers.0.self_attn.other"]
