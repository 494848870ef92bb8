"""Other systems beside cpumoe: each gives the layer it is asked for, and failures are reported, not raised."""

from __future__ import annotations

import peers
import pytest
import torch
from peer import GROUPED, PER_CHANNEL, LayerWeights, Peer, PreparedPeer, repeated
from random_layers import relative_error

from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import random_routing
from cpumoe.layers.reference import Dense, dequantize, experts

SHAPE = Shape("tiny", 256, 128, 6, 2)


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_peers_compute_the_layer(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := peer.obstacle(SHAPE)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr("peer.ROTATED_BYTES", 1)
    prepared = peer.prepare(SHAPE, torch.float32)
    assert len(prepared.calls) == 2 and prepared.bytes_per_expert > 0
    scheme = GROUPED if "g128" in prepared.scheme else PER_CHANNEL
    weights = LayerWeights.random(SHAPE, scheme, 0)
    gate_up, down = (repeated(dequantize(weight), SHAPE) for weight in (weights.gate_up, weights.down))
    x = torch.randn(9, SHAPE.hidden)
    ids, shares = random_routing(SHAPE, 9, 1)
    from cpumoe import Activation

    expected = experts(x, ids, shares, lambda e: (Dense(gate_up[e]), Dense(down[e])), Activation(), form=None)
    assert relative_error(prepared.calls[0](x, ids, shares), expected) < 0.05


def test_rows_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(peers.TorchBf16Peer):
        name = "broken"

        def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
            raise RuntimeError("no weights today")

    class Missing(Broken):
        name = "missing"
        packages = ("a_package_that_nobody_has",)

    monkeypatch.setattr("peer.ROTATED_BYTES", 1)
    monkeypatch.setattr(peers, "PEERS", (Broken(), Missing(), peers.TorchBf16Peer()))
    told: list[str] = []
    rows = list(peers.bench_peers(SHAPE, [3, 1], torch.bfloat16, 0.02, told.append))
    assert [(row.system, row.tokens, row.isa) for row in rows] == [("torch-bf16", 1, "-"), ("torch-bf16", 3, "-")]
    assert told == [
        "broken: RuntimeError: no weights today",
        "missing: package a-package-that-nobody-has is not installed",
    ]
