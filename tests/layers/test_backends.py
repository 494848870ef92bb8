"""The choice among backends, and that each computes the same layer."""

from __future__ import annotations

import logging

import pytest
import torch
from random_layers import SCHEMES, fitting, random_layer, relative_error, routing

import cpumoe
from cpumoe import MoEConfig, NoBackend, RoutingMethod, Scheme, explain, select_backend
from cpumoe.layers import backends


def config(scheme: str = "w4a8-g32", **facts: object) -> MoEConfig:
    return MoEConfig(Scheme.parse(scheme), 4, 128, 96, **facts)  # type: ignore[arg-type]


def test_aten_agrees_with_native() -> None:
    for scheme, scale_dtype in (
        ("w4a8-g32", torch.bfloat16),
        ("w4a8", torch.float32),
        ("w4a16-g32+int8", torch.bfloat16),
    ):
        layer = random_layer(scheme, bias=True, scale_dtype=scale_dtype)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(11, 128).to(dtype)
            ids, weights = routing(11, 4, 2)
            ids[3, 1] = -1
            native = layer.experts("native")(x, ids, weights)
            aten = layer.experts("aten")(x, ids, weights)
            assert relative_error(aten, native) < (3e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_backend_keeps_a_nan_in_its_token(scheme: str) -> None:
    size = fitting(scheme, 192)
    layer = random_layer(scheme, hidden=size, inner=size, scale_dtype=torch.bfloat16)
    ids, weights = routing(5, 4, 2)
    x = torch.randn(5, size)
    if scheme == "fp8-tensor-dynamic":  # all tokens have one scale, in which a poisoned one has no say
        x[2] = 0
    for name in ("native", "aten", "reference") if scheme == "w4a8-g32" else ("native", "reference"):
        experts = layer.experts(name)
        clean = experts(x, ids, weights)
        for poison in (torch.nan, torch.inf, -torch.inf):
            bad = x.clone()
            bad[2, 7] = poison
            out = experts(bad, ids, weights)
            assert out[2].isnan().all(), name
            torch.testing.assert_close(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_every_backend_makes_nan_of_an_intermediate_overflow() -> None:
    layer = random_layer("w4a8-g32", scale_dtype=torch.bfloat16)
    ids, weights = routing(3, 4, 2)
    x = torch.randn(3, 128)
    x[1] *= 1e30
    nobody = torch.full_like(ids, -1)
    for name in ("native", "aten", "reference"):
        out = layer.experts(name)(x, ids, weights)
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all(), name
        x_nan = torch.full_like(x, torch.nan)  # a token that nobody takes contributes nothing
        assert torch.equal(layer.experts(name)(x_nan, nobody, weights), torch.zeros(3, 128)), name


def test_first_that_serves_is_taken(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPUMOE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_logged", set())
    with caplog.at_level(logging.INFO, logger="cpumoe"):
        assert select_backend(config()).name == "native"
        assert select_backend(config()).name == "native"
    assert [r.message for r in caplog.records] == ["w4a8-g32 experts run on the native backend"]


def test_reasons() -> None:
    told = {v.backend: v.obstacle for v in explain(config("w8a8"))}
    assert told["native"] is None and told["reference"] is None
    assert told["aten"] == "scheme w8a8; PyTorch's product has symmetric int4 weights and int8 activations only"
    for scheme in ("w4a16", "w4a16-g32-asym+int8", "mxfp4a16", "nvfp4a16+int8", "w4afp8", "fp8", "w8a8-static", "bf16"):
        told = {v.backend: v.obstacle for v in explain(config(scheme))}
        assert told["native"] is None and told["reference"] is None
        assert str(told["aten"]).startswith(f"scheme {scheme}; PyTorch's product has symmetric int4")
    assert "bfloat16" in str({v.backend: v.obstacle for v in explain(config())}["aten"])
    for facts, word in [
        ({"device": "cuda"}, "only 'cpu' is served"),
        ({"routing": RoutingMethod.UNSPECIFIED}, "unspecified"),
        ({"routing": "unspecified"}, "unspecified"),
        ({"logits_dtype": torch.int32}, "floating point"),
        ({"expert_map": True}, "map the ids before the call"),
    ]:
        wrong = config(scale_dtype=torch.bfloat16, **facts)  # with scales that every backend takes
        assert all(word in str(v.obstacle) for v in explain(wrong))
        with pytest.raises(NoBackend, match=f"native: .*{word}"):
            select_backend(config(**facts))


def test_a_named_backend_is_used_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend(config(), "reference").name == "reference"
    with pytest.raises(NoBackend, match="backend='aten' cannot serve this layer: scheme w8a8"):
        select_backend(config("w8a8"), "aten")
    with pytest.raises(NoBackend, match="backend='cuda' is not known; accepted are native, aten, reference, auto"):
        select_backend(config(), "cuda")
    for name in ("", "auto"):
        monkeypatch.setenv("CPUMOE_BACKEND", name)
        assert select_backend(config()).name == select_backend(config(), "auto").name == "native"
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    assert select_backend(config(), "auto").name == "reference", "auto is the default choice, which this changes"
    assert random_layer("w4a8-g32").experts().backend.name == "reference"
    packed = random_layer("w4a8-g32").experts("native")
    with pytest.raises(NoBackend, match="packed weights are for the native backend, not for 'reference'"):
        cpumoe.Experts.from_packed(packed.gate_up_packed, packed.down_packed, activation="silu")
    monkeypatch.setenv("CPUMOE_BACKEND", "aten")
    with pytest.raises(NoBackend, match="CPUMOE_BACKEND='aten' cannot serve"):
        select_backend(config("w8a8"))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"hidden_size": 100}, "hidden_size=100; a positive multiple of 32"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"experts": 0}, "experts=0"),
    ],
)
def test_impossible_configurations(facts: dict[str, int], message: str) -> None:
    sizes = {"experts": 4, "hidden_size": 128, "intermediate_size": 96, **facts}
    with pytest.raises(ValueError, match=message):
        MoEConfig(Scheme.parse("w8a8"), **sizes)
    with pytest.raises(ValueError, match="tp_size=0"):
        cpumoe.ParallelLayout(tp_size=0)
