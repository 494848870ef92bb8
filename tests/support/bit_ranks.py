"""Ledger of bits: native decoders of models that are sharded over two ranks, processes with shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bit_cases import Case, Compute, Recorder, Setting, all_settings, hash_tensors, using
from bit_models import exact_model, has_native_head
from bit_numbers import RoundedOnce, integers
from bit_products import DTYPES, rounds_on_amx
from rank_processes import run_ranks
from transformers.utils import logging as transformers_logging

import cpumoe
from cpumoe import ParallelLayout
from cpumoe.parallel.ranks import Ranks


@dataclass(frozen=True)
class _Sharded:
    """A model on two ranks: how it is quantised and what is different in its configuration, so that it divides."""

    scheme: str
    linears: str | None
    dtype: str
    changes: dict[str, Any]

    def __str__(self) -> str:
        linears = "" if self.linears is None else f" {self.linears} linears"
        return f"{self.scheme}{linears} {self.dtype}"


_WIDE = {"moe_intermediate_size": 128}

#: One family for every kind of layer.
_MODELS = {
    "qwen3_moe": _Sharded("w4a8-g32", None, "fp32", {**_WIDE, "num_key_value_heads": 4}),
    "gpt_oss": _Sharded("w8a8", "w8a8", "bf16", {"intermediate_size": 128, "num_key_value_heads": 4}),
    "deepseek_v3": _Sharded("w4a16-g32", "w8a8", "fp32", _WIDE),
    "qwen3_next": _Sharded("w8a8-g32", "w8a8", "fp32", _WIDE),
    "kimi_linear": _Sharded("w4a8-g32", None, "fp32", _WIDE),
    "lfm2_moe": _Sharded("w8a8", "w8a8", "fp16", _WIDE),
}

_LAYOUTS = {
    "TP=2": {"tp_size": 2},
    "EP=2": {"tp_size": 2, "expert_parallel": True},
    "DP=2 EP=2": {"dp_size": 2, "expert_parallel": True},
}

_TOKENS = 12


def rank_cases() -> Iterator[Case]:
    """Yield the cases of two ranks."""
    for family, sharded in _MODELS.items():
        rounds = any(rounds_on_amx(scheme) for scheme in (sharded.scheme, sharded.linears) if scheme is not None)
        name = f"two ranks/{family}/{sharded}"
        yield Case(name, lambda f=family: _two_ranks(f), rounds_on_amx=rounds, runs_once=True)


def _two_ranks(family: str) -> Compute:
    sharded = _MODELS[family]

    def compute(recorder: Recorder) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _save(exact_model(family, DTYPES[sharded.dtype], **sharded.changes), folder)
            found = run_ranks(2, "bit_ranks:run_layouts", folder, family)
        for rank, outputs in enumerate(found):
            for output, isa, digest in outputs:
                variant = f"rank {rank}" if rank else ""
                recorder.add_hash(output, digest, variant=variant, setting=Setting(isa, 1))

    return compute


def _save(model: Any, folder: str) -> None:
    """Write a checkpoint without a progress bar."""
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        transformers_logging.enable_progress_bar()


def run_layouts(folder: str, family: str) -> list[tuple[str, str, str]]:
    """In a rank's process: return output, kernels and hash of each layout and kernel."""
    sharded, found = _MODELS[family], []
    torch.set_num_threads(1)
    for name, sizes in _LAYOUTS.items():
        ranks = Ranks.join(ParallelLayout(**sizes))
        options = {"scheme": sharded.scheme, "linears": sharded.linears, "dtype": DTYPES[sharded.dtype]}
        with RoundedOnce():
            model = cpumoe.load_model(Path(folder), ranks=ranks, **options)
        if not has_native_head(model):
            raise ValueError(f"the native decoder does not run {family} with {name}")
        for setting in all_settings((1,)):
            with using(setting):
                found.append((f"{name}/logits", setting.isa, hash_tensors(_logits(model))))
    return found


@torch.no_grad()
def _logits(model: Any) -> list[torch.Tensor]:
    """Return the logits of a prompt and of a decoded token, of one sequence."""
    ids = integers("ids", 3, 98, 1, _TOKENS)
    first = model(input_ids=ids, use_cache=True)
    second = model(input_ids=ids[:, :1], past_key_values=first.past_key_values)
    return [first.logits, second.logits]
