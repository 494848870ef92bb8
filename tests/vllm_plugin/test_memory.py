"""Experts are packed while vLLM loads: at no time does it take more than the packed weights and one layer."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import HERE, ONE_PROCESS, run
from model_checkpoint import write_checkpoint
from model_shape import ModelShape

from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.layers.scheme import Scheme

_SHAPE = ModelShape(
    layers=8, hidden=1024, intermediate=512, experts=48, heads=8, kv_heads=2, head_dim=64, vocabulary=1024
)


def test_packed_while_they_are_loaded(checkpoints: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, _SHAPE, storage_for(Scheme.parse("w4a8-g128")))
    printed = run(HERE / "measure_load.py", checkpoints / "int-quantized-w4a8-g32", tmp_path, environment=ONE_PROCESS)
    (line,) = (line for line in printed.splitlines() if line.startswith("MEASURED "))
    measured = json.loads(line.removeprefix("MEASURED "))
    weights = 3 * _SHAPE.experts * _SHAPE.hidden * _SHAPE.intermediate
    layer = weights // 2 + weights // 128 * 4  # 4 bits each, and a scale for 128
    packed = layer * _SHAPE.layers
    rest = 24_000_000  # embeddings, head, angles of 40960 positions
    assert measured["after"] > packed  # they are in memory, not only in pages of the file
    assert measured["peak"] < packed + layer + rest
    assert measured["left"] < packed / 4  # and they go with their model
