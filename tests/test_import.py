"""What ``import cpumoe`` does and does not do, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import first_of

import cpumoe

SHIPPED = Path(cpumoe.__file__).parent / "data" / "python-stdlib-w4a8-g128"
CHECKPOINT = Path(__file__).parent / "data" / "checkpoints" / "qwen3moe-w4a8-g32-packed"

_PATCHED = """
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
print(
    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"].__module__.split(".")[0],
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].__module__.split(".")[0],
    PreTrainedModel.get_correct_experts_implementation.__module__.split(".")[0],
    "cpumoe" in ALL_EXPERTS_FUNCTIONS.valid_keys(),
)
"""


def run(code: str, switch: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CPUMOE_TRANSFORMERS"}
    if switch is not None:
        environment["CPUMOE_TRANSFORMERS"] = switch
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_pytorch_is_imported_when_it_is_needed() -> None:
    done = run(
        "import sys, cpumoe\n"
        "assert set(cpumoe.__all__) <= set(dir(cpumoe))\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)\n"
        "print(cpumoe.GroupShape.__name__, 'torch' in sys.modules)\n"
        "print(cpumoe.get_num_threads() == sys.modules['torch'].get_num_threads())\n"
    )
    assert done.stdout.splitlines() == ["False False", "GroupShape False", "True"], done.stderr


@pytest.mark.parametrize("order", ["import cpumoe, torch", "import torch, cpumoe"])
def test_the_operators_exist_in_either_order(order: str) -> None:
    done = run(f"{order}\nprint(torch.ops.cpumoe.pack, cpumoe.ops.__name__, cpumoe.numa.__name__)")
    assert done.stdout.strip() == "cpumoe.pack cpumoe.ops cpumoe.numa", done.stderr


def test_an_import_that_failed_can_be_tried_again() -> None:
    done = run(
        "import importlib, sys, torch\n"
        "sys.modules['cpumoe.ops'] = None\n"
        "try:\n    import cpumoe\nexcept ImportError as problem:\n    print('ops' in str(problem))\n"
        "del sys.modules['cpumoe.ops']\n"
        "import cpumoe\n"
        "importlib.reload(cpumoe)\n"
        "print(torch.ops.cpumoe.pack)\n"
    )
    assert done.stdout.splitlines() == ["True", "cpumoe.pack"], done.stderr


def test_neither_transformers_nor_the_quantiser_is_imported() -> None:
    done = run(
        "import sys, cpumoe\n"
        "assert set(cpumoe.__all__) <= set(dir(cpumoe)), 'names that are imported later are listed too'\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformers'"
        " or name.startswith(('cpumoe.quantization', 'cpumoe.cli', 'cpumoe.generation'))])\n"
        "cpumoe.quantize_checkpoint\n"
        "print('cpumoe.quantization' in sys.modules, 'transformers' in sys.modules)"
    )
    assert done.stdout.splitlines() == ["[]", "True False"], done.stderr


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "order", first_of(["import cpumoe\nimport transformers", "import transformers\nimport cpumoe"], 1)
)
@pytest.mark.parametrize(
    ("switch", "found"),
    [
        (None, "cpumoe cpumoe cpumoe True"),
        ("1", "cpumoe cpumoe cpumoe True"),
        ("0", "transformers transformers transformers False"),
    ],
)
def test_transformers_is_taken_over_unless_that_is_switched_off(order: str, switch: str | None, found: str) -> None:
    done = run(order + _PATCHED, switch)
    assert done.stdout.strip() == found, done.stderr


_OLD = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.19.2" if name == "transformers" else version(name)
"""


@pytest.mark.parametrize(
    "order", first_of(["import cpumoe\nimport transformers", "import transformers\nimport cpumoe"], 1)
)
def test_an_older_transformers_is_left_as_it_is(order: str) -> None:
    done = run("import transformers\n" + _OLD + order + _PATCHED)
    assert done.stdout.strip() == "transformers transformers transformers False", done.stderr
    assert done.stderr.count("cpumoe leaves transformers as it is: it needs transformers 5.22 or newer, and this ") == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["load_model", "accelerate", "PackedConfig", "quantize_checkpoint", "own_sequences"])
def test_without_transformers_it_is_named_and_not_what_it_brings(name: str) -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(['transformers', 'huggingface_hub', 'tqdm', 'tokenizers']))"
    done = run(f"{missing}\nimport cpumoe\ncpumoe.{name}")
    expected = f"ImportError: cpumoe.{name} needs transformers: pip install 'cpumoe[transformers]'"
    assert done.stderr.rstrip().endswith(expected), done.stderr


def test_what_needs_a_newer_transformers_says_so() -> None:
    done = run(_OLD + "import cpumoe\ncpumoe.load_model")
    expected = "ImportError: cpumoe.load_model needs transformers 5.22 or newer, and this is 5.19.2: pip install "
    assert expected in done.stderr
    command = f"import cpumoe_command, sys\nsys.argv[1:] = ['generate', {str(SHIPPED)!r}, 'x']\n"
    done = run(_OLD + command + "sys.exit(cpumoe_command.main())")
    assert done.returncode == 2
    assert "this command needs transformers 5.22 or newer, and this is 5.19.2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("switch", first_of(["", "off", "2"], 1))
def test_other_values_of_the_switch_are_refused(switch: str) -> None:
    done = run("import cpumoe", switch)
    assert done.returncode != 0
    assert f"CPUMOE_TRANSFORMERS={switch!r}; 0 (transformers is left as it is) and 1" in done.stderr


@pytest.mark.full
def test_what_was_taken_over_is_said_once() -> None:
    code = "import logging\nlogging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s')\nimport cpumoe\n"
    said = run(code + _PATCHED).stderr
    assert said.count("cpumoe: transformers loads quantised checkpoints (compressed-tensors, ") == 1
    assert said.count("CPUMOE_TRANSFORMERS=0 switches this off") == 1
    assert "cpumoe" not in run(code + _PATCHED, "0").stderr


@pytest.mark.full
def test_load_model_packs_where_the_plug_in_is_switched_off_and_leaves_transformers_as_it_was() -> None:
    code = (
        "import cpumoe\n"
        f"model = cpumoe.load_model({str(CHECKPOINT)!r})\n"
        "print(sum(isinstance(module, cpumoe.Experts) for module in model.modules()) > 0)"
    )
    done = run(code + _PATCHED, "0")
    assert done.stdout.splitlines() == ["True", "transformers transformers transformers False"], done.stderr


def test_the_command_refuses_a_bad_switch_in_one_line() -> None:
    done = run(
        "import sys; from cpumoe_command import main; sys.argv = ['cpumoe', 'doctor']; sys.exit(main())", "maybe"
    )
    assert done.returncode == 2 and done.stderr.startswith("cpumoe: CPUMOE_TRANSFORMERS='maybe'; 0 ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_load_model_may_run_in_several_threads_while_the_plug_in_is_switched_off() -> None:
    """Blocks overlap: the first to enter leaves first. Threads outside of all blocks get transformers' own reader."""
    code = """
import threading
import cpumoe
from cpumoe.integrations.transformers.hook import own_reader
from cpumoe.integrations.transformers.loading.plugin import PackedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

section = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True},
}}}
seen = {}

def read(name):
    try:
        seen[name] = isinstance(AutoQuantizationConfig.from_dict(dict(section)), PackedConfig)
    except ImportError:  # transformers' own reader asks for a package
        seen[name] = False

def first():
    with own_reader():
        read("first")
        first_is_inside.set()
        second_is_inside.wait(30)
    first_has_left.set()

def second():
    first_is_inside.wait(30)
    with own_reader():
        second_is_inside.set()
        first_has_left.wait(30)
        read("second")
        outside = threading.Thread(target=read, args=["outside"])
        outside.start()
        outside.join()

first_is_inside, second_is_inside, first_has_left = (threading.Event() for _ in range(3))
threads = [threading.Thread(target=each) for each in (first, second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(seen)
"""
    done = run(code + _PATCHED, "0")
    found = ["{'first': True, 'second': True, 'outside': False}", "transformers transformers transformers False"]
    assert done.stdout.splitlines() == found, done.stderr


def test_finders_that_ask_each_other_do_so_once() -> None:
    """Another tool's finder may delegate to all others, as ours does."""
    code = """
import sys, cpumoe

class Delegating:
    def find_spec(self, name, path=None, target=None):
        others = (finder for finder in sys.meta_path if finder is not self)
        return next((s for s in (f.find_spec(name, path, target) for f in others) if s is not None), None)

sys.meta_path.insert(0, Delegating())
import torch
print(torch.ops.cpumoe.rms_norm)
"""
    done = run(code)
    assert done.stdout.startswith("cpumoe.rms_norm"), done.stderr
