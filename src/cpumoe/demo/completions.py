"""Completions of the model that comes with the package, and the same model in float for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpumoe.layers import reference
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.steps.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file without their ends."""\n',
    "class TestStack(unittest.TestCase):\n    def setUp(self):\n        self.stack = []\n\n    def test_push(self):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
)

SAMPLING = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=3)


def float_model(model: PreTrainedModel) -> PreTrainedModel:
    """The float model that a packed Qwen3-MoE represents, as transformers runs it: weights times scales."""
    from transformers import AutoModelForCausalLM

    state: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = unpack_weight(state.pop(f"{name}.weight_packed"))
            state[f"{name}.weight"] = reference.dequantize(weight)[0]
        elif isinstance(module, Experts):
            del state[f"{name}.gate_up_packed"], state[f"{name}.down_packed"]
            quantized = module.quantized()
            state[f"{name}.gate_up_proj"] = reference.dequantize(quantized.gate_up)
            state[f"{name}.down_proj"] = reference.dequantize(quantized.down)
    config = type(model.config).from_dict(model.config.to_dict())
    config.quantization_config = None
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    plain.load_state_dict(state)
    plain.eval()
    return plain
