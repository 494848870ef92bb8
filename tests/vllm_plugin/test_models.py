"""Whole models in vLLM: the tokens of cpumoe's own path in fp32, in every on-disk form."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CPUS, ONE_PROCESS, is_right, needs_two_cpus, run_models


@pytest.fixture(scope="module")
def eager(
    checkpoints: Path, cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    """Two processes of one thread share the models: starting vLLM takes longer than the models do, and one core."""
    folder, names = tmp_path_factory.mktemp("eager"), list(cases)

    def run_some(part: int) -> tuple[dict[str, Any], str]:
        environment = {**ONE_PROCESS, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return run_models(
            checkpoints / "cases.json", folder / str(part), {"enforce_eager": True}, environment, names[part::2]
        )

    with ThreadPoolExecutor(2) as both:
        parts = list(both.map(run_some, range(2)))
    return {name: found for some, _ in parts for name, found in some.items()}, "".join(text for _, text in parts)


def test_every_checkpoint(eager: tuple[dict[str, Any], str], cases: dict[str, Any]) -> None:
    found, _ = eager
    assert found.keys() == cases.keys()
    wrong = {}
    for name, case in cases.items():
        try:
            is_right(found[name], case["answers"])
        except AssertionError as problem:
            wrong[name] = str(problem)
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_all_of_it_is_ours(eager: tuple[dict[str, Any], str]) -> None:
    """One line for each kind of checkpoint, and nothing is left to vLLM."""
    _, printed = eager
    told = [line for line in printed.splitlines() if "cpumoe" in line and "telling.py" in line]
    expected = "computes the experts (w4a8-g128) and the quantised linears (w4a8-g128) of this model, with "
    assert any(expected in line for line in told)
    assert not [line for line in told if "leaves" in line and "CPUMOE_VLLM=0 leaves" not in line]


def test_left_to_vllm(checkpoints: Path, tmp_path: Path) -> None:
    """Weights that vLLM makes up are its own, and so are the layers that have them."""
    options = {"enforce_eager": True, "load_format": "dummy"}
    found, printed = run_models(checkpoints / "cases.json", tmp_path / "found", options, ONE_PROCESS, ["float"])
    assert isinstance(found["float"], list), found
    assert "cpumoe leaves model.layers.0.mlp.experts to vLLM: weights of the load format 'dummy' are not " in printed
    assert " computes the experts" not in printed


def test_compiled(checkpoints: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    """torch.compile is vLLM's default. What it has compiled and kept without cpumoe must not be taken for this."""
    environment = {**ONE_PROCESS, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    kept = tmp_path / "cache" / "torch_compile_cache" / "torch_aot_compile"
    for count, switch, only in ((1, "0", ["float"]), (3, "1", ["float", "gpt-oss mxfp4"])):
        environment |= {"CPUMOE_VLLM": switch}
        found, _ = run_models(checkpoints / "cases.json", tmp_path / "found", {}, environment, only)
        for name in only:
            is_right(found[name], cases[name]["answers"])
        assert len(list(kept.iterdir())) == count


@needs_two_cpus
@pytest.mark.parametrize("experts", [False, True], ids=["TP", "TP and EP"])
def test_two_workers(experts: bool, checkpoints: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    only = ["int-quantized w4a8-g32"] if experts else ["pack-quantized, ordered", "gpt-oss mxfp4"]
    options = {"enforce_eager": True, "tensor_parallel_size": 2, "enable_expert_parallel": experts}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[1]}"}
    found, _ = run_models(checkpoints / "cases.json", tmp_path / "found", options, environment, only)
    for name in only:
        is_right(found[name], cases[name]["answers"])


@pytest.mark.parametrize(
    ("latent", "environment"), [(True, {}), (False, {"VLLM_MLA_DISABLE": "1"})], ids=["latent", "expanded"]
)
def test_deepseek_beside_vllm_itself(
    latent: bool, environment: dict[str, str], checkpoints: Path, cases: dict[str, Any], tmp_path: Path
) -> None:
    """Groups and a bias for the choice, latent attention: as vLLM alone computes the same weights in float."""
    prompts = [{"prompt": answer["prompt"], "tokens": answer["tokens"]} for answer in cases["float"]["answers"]]
    folders = {"quantised": checkpoints / "deepseek", "float": checkpoints / "deepseek-float"}
    own = {name: {"folder": str(folder), "answers": prompts} for name, folder in folders.items()}
    (tmp_path / "cases.json").write_text(json.dumps(own))
    options: dict[str, Any] = {"enforce_eager": True}
    if latent:
        options["attention_config"] = {"backend": "CPU_MLA"}
    environment = {**ONE_PROCESS, **environment}
    ours, _ = run_models(tmp_path / "cases.json", tmp_path / "ours", options, environment)
    theirs, _ = run_models(
        tmp_path / "cases.json", tmp_path / "theirs", options, {**environment, "CPUMOE_VLLM": "0"}, ["float"]
    )
    for name, tolerance in (("quantised", 1e-2), ("float", 1e-4)):
        assert isinstance(ours[name], list), ours[name]
        for one, other in zip(ours[name], theirs["float"], strict=True):
            assert one["tokens"] == other["tokens"]
            for mine, stock in zip(one["logprobs"], other["logprobs"], strict=True):
                shared = mine.keys() & stock.keys()
                assert max(abs(mine[token] - stock[token]) for token in shared) < tolerance
