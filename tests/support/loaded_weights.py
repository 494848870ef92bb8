"""What is packed after loading a checkpoint, as float weights by the names of linears, and what stops the load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpumoe import CheckpointError, UnsupportedScheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.loading import find_experts, load_experts
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.reference import dequantize


def packed_weights(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Dequantised weights of all quantised linears, those of experts too, out of their packed form; their schemes."""
    weights, schemes = {}, set()
    with Checkpoint.open(folder) as checkpoint:
        layout = describe(checkpoint)
        sources = [find_experts(checkpoint, experts, None) for experts in layout.experts]
        linears, check = quantized_linears(checkpoint, layout), TensorCheck(checkpoint)
        check_model(layout, sources, linears, check)
        check.raise_problems()
        for name, source in linears.items():
            weights[name] = dequantize(unpack_weight(source.load().weight_packed)[0])
            schemes.add(str(source.storage.scheme))
        for source in sources:
            experts = load_experts(source)
            schemes.add(str(experts.config.scheme))
            for expert in range(experts.config.local_experts):
                part = experts.quantized(expert, 1)[0]
                gate_up, down = dequantize(part.gate_up), dequantize(part.down)
                names = source.linear_names(expert)
                weights |= dict(zip(names, (*gate_up.chunk(2), down), strict=True))
    return weights, schemes


def assert_loads(folder: Path, expected: dict[str, Tensor]) -> set[str]:
    """Inspection finds nothing wrong, and exactly the expected weights are packed, to the bit. Returns the schemes."""
    with Checkpoint.open(folder) as checkpoint:
        assert not Survey(checkpoint, describe).problems
    found, schemes = packed_weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    return schemes


def refusal(folder: Path, kind: type[Exception] = CheckpointError) -> str:
    """What loading says as it refuses; inspection must find a problem too."""
    with pytest.raises((CheckpointError, UnsupportedScheme)) as refused:
        packed_weights(folder)
    assert isinstance(refused.value, kind), refused.value
    with Checkpoint.open(folder) as checkpoint:
        problems = Survey(checkpoint, describe).problems
    assert problems, f"inspection finds nothing wrong; loading says: {refused.value}"
    return str(refused.value)
