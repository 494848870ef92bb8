"""Models that need more memory than is free are refused before their weights are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_checkpoints import write_holes
from commands import run_with_address_space
from tiny_models import ARCHITECTURES, write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.cli import main
from cpumoe.errors import NotEnoughMemory
from cpumoe.free_memory import available_bytes
from cpumoe.integrations.transformers.loading import load_memory, plugin
from cpumoe.integrations.transformers.loading.load_memory import WeightBytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: write_tiny_model(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}
    made["quantised"] = tmp_path_factory.mktemp("model") / "quantised"
    cpumoe.load_model(made["qwen3_moe"], scheme="w4a8-g32", linears="w8a8").save_pretrained(made["quantised"])
    return made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what the kernel says to be free."""

    def set_free(size: int) -> None:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {size // 1024} kB\n")
        monkeypatch.setattr(load_memory, "available_bytes", partial(available_bytes, tmp_path))

    return set_free


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[WeightBytes]:
    """The sizes that the loads of a test foresaw."""
    seen: list[WeightBytes] = []

    def watched(*arguments: Any, **options: Any) -> WeightBytes:
        seen.append(load_memory.weight_bytes(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(plugin, "weight_bytes", watched)
    return seen


def mappings() -> list[tuple[int, int]]:
    """Addresses at which files of tensors are mapped."""
    lines = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if "safetensors" in line[-1]]
    return [(int(first, 16), int(last, 16)) for first, last in ranges]


FLOAT = {"scheme": "float"}
EXPERTS = {"scheme": "w4a8-g32"}
LINEARS = {"scheme": "w8a8", "linears": "w4a8-g32"}


@pytest.mark.parametrize(
    ("name", "dtype", "loads"),
    [
        ("qwen3_moe", torch.float32, [FLOAT, EXPERTS, {}, LINEARS]),
        ("qwen3_moe", torch.bfloat16, [FLOAT, LINEARS]),
        ("gpt_oss", torch.float32, [FLOAT, EXPERTS]),
        ("quantised", torch.bfloat16, [{}]),
        pytest.param("deepseek_v3", torch.bfloat16, [FLOAT, LINEARS], marks=pytest.mark.full),
        pytest.param("qwen3_next", torch.float32, [EXPERTS, LINEARS], marks=pytest.mark.full),
    ],
)
def test_sizes_are_foreseen(
    folders: dict[str, Path],
    weights: list[WeightBytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    loads: list[dict[str, Any]],
) -> None:
    monkeypatch.setenv("CPUMOE_STEPS", "0")  # no steps are computed
    for options in [*loads, *[loads[-1] | {"cache": tmp_path / "cache"}] * 2]:
        model = cpumoe.load_model(folders[name], dtype=dtype, **options)
        tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values()
        files = mappings()
        mapped = [t for t in tensors if any(first <= t.data_ptr() < last for first, last in files)]
        # Some routers have a bias of a few bytes that stays in fp32.
        assert weights[-1].whole == pytest.approx(sum(t.nbytes for t in tensors), abs=64)
        assert weights[-1].mapped == pytest.approx(sum(t.nbytes for t in mapped), abs=64)


@pytest.mark.parametrize("name", ["qwen3_moe", "quantised"])
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    folders: dict[str, Path],
    weights: list[WeightBytes],
    free: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    opened: list[Checkpoint] = []

    class Watched(Checkpoint):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(plugin, "Checkpoint", Watched)
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    options: dict[str, Any] = {"dtype": torch.bfloat16} | ({"scheme": "w8a8"} if name == "qwen3_moe" else {})
    free(0)
    with pytest.raises(
        NotEnoughMemory, match=r"the weights take .* kB of memory \(.* packed, .* in float.*; 0 B are free"
    ):
        cpumoe.load_model(folders[name], **options)
    private = weights[-1].whole - weights[-1].mapped
    assert opened[-1].bytes_read == 0 and private > 10_000
    free(private - 1024)
    with pytest.raises(MemoryError):
        cpumoe.load_model(folders[name], **options)
    free(private + 1024)
    cpumoe.load_model(folders[name], **options)
    with pytest.raises(NotEnoughMemory, match="and 1.0 MB have to be left free; .* CPUMOE_MEMORY_CHECK=0"):
        cpumoe.load_model(folders[name], reserve_bytes=10**6, **options)
    free(0)
    monkeypatch.setenv("CPUMOE_MEMORY_CHECK", "0")
    cpumoe.load_model(folders[name], **options)
    monkeypatch.setenv("CPUMOE_MEMORY_CHECK", "no")
    with pytest.raises(ValueError, match="CPUMOE_MEMORY_CHECK='no'; 0 "):
        cpumoe.load_model(folders[name], **options)


def test_weights_mapped_from_the_packed_cache_need_no_free_memory(
    folders: dict[str, Path], free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    load = partial(cpumoe.load_model, folders["qwen3_moe"], scheme="w4a8-g32", dtype=torch.float32, cache=tmp_path)
    load()
    free(2048)  # the floats are mapped from the checkpoint
    load()
    with pytest.raises(NotEnoughMemory, match="of these are mapped from files"):
        load(reserve_bytes=0)  # a server needs room for them besides its KV cache
    [file] = tmp_path.glob("*.packed.safetensors")
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(contents)
    with pytest.raises(NotEnoughMemory):  # a damaged cache is packed anew, in memory
        load()


def test_commands_refuse_in_one_line(folders: dict[str, Path], free: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folders["qwen3_moe"])
    free(100_000)
    assert main(["generate", folder, "The", "--scheme", "w8a8"]) == 2
    assert capsys.readouterr().err.startswith(f"cpumoe generate: {folder}: the weights take ")
    free(1024 * 10**6)
    assert main(["serve", folder, "--scheme", "w8a8", "--memory-gb", "200", "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert "and 200.0 GB have to be left free; 1.0 GB are free" in told and len(told.splitlines()) == 1


def test_eval_needs_memory_for_both_models(
    folders: dict[str, Path],
    free: Any,
    weights: list[WeightBytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    folder, text = str(folders["qwen3_moe"]), tmp_path / "text"
    text.write_text("Experts are chosen by a router. " * 8)
    command = ["eval", folder, "--text", str(text), "--scheme", "w8a8", "--against", folder]
    free(10**9)
    assert main(command) == 0
    model, against = weights
    both = model.whole + against.whole - against.mapped
    free(both + 1024)
    assert main(command) == 0
    capsys.readouterr()
    free(both - 1024)
    assert main(command) == 2
    assert "have to be left free" in capsys.readouterr().err and len(weights) == 5


def test_files_larger_than_memory_are_loaded(tmp_path: Path) -> None:
    """transformers maps files, which a process cannot do that may not have so many addresses. It reads them then."""
    folder = write_tiny_model(tmp_path, "qwen3_next")
    command = ("generate", str(folder), "The", "--scheme", "w4a8-g32", "--max-new-tokens", "4", "--greedy")
    expected = run_with_address_space(64 << 40, *command)
    assert expected.returncode == 0 and expected.stdout
    write_holes(folder / "model.safetensors", {"mtp.norm.weight": ("BF16", (2**35,), 2**36)})  # which no model has
    done = run_with_address_space(32 << 30, *command)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
