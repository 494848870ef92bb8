"""Ledger of bits: forward passes of tiny models whose native decoder computes everything from ids to logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bit_cases import Case, Compute, Recorder
from bit_models import exact_model, has_native_head, native_base, packed_model
from bit_numbers import RoundedOnce, integers
from bit_products import DTYPES, rounds_on_amx
from every_architecture import FAMILIES, logits_of
from torch import Tensor
from transformers import DynamicCache

import cpumoe
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.int8_cache import hold_caches

#: Families whose forward pass is one call of the core; test_native_decoder.py has the same list.
NATIVE = (
    *("afmoe", "aria", "aria_text", "bailing_hybrid", "deepseek_ocr2", "deepseek_ocr2_text", "deepseek_v2"),
    *("deepseek_v2_lite", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe"),
    *("glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v3", "kimi_linear", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "mistral4_text"),
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    *("qwen3_next_dense", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
    *("qwen3_vl_moe_text", "solar_open"),
)

#: One family for every kind of layer: GQA, sinks and sliding windows, MLA, gated delta net, Kimi delta attention with
#: MLA, short convolution.
KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear", "lfm2_moe")

#: Families that transformers itself cannot load alone.
_NOT_RUN = ("mistral_large4_text",)


@dataclass(frozen=True)
class Variant:
    """How a model is quantised, and its dtype. ``linears``: None leaves them and the head in float."""

    scheme: str
    linears: str | None
    dtype: str

    def __str__(self) -> str:
        linears = "" if self.linears is None else f" {self.linears} linears"
        return f"{self.scheme}{linears} {self.dtype}"

    @property
    def rounds_on_amx(self) -> bool:
        """Whether AMX has bits of its own."""
        return rounds_on_amx(self.scheme) or (self.linears is not None and rounds_on_amx(self.linears))


#: Every family has the first two; one family for every kind of layer has all of them.
_VARIANTS = (
    Variant("w4a8-g32", None, "fp32"),
    Variant("w8a8", "w8a8", "bf16"),
    Variant("w4a16-g32", "w8a16", "fp16"),
    Variant("mxfp4", "fp8", "bf16"),
)
_FAST = {"qwen3_moe": _VARIANTS[0], "gpt_oss": _VARIANTS[3], "deepseek_v3": _VARIANTS[1], "kimi_linear": _VARIANTS[1]}


def step_cases() -> Iterator[Case]:
    """Yield the cases of native decoders."""
    for family in NATIVE:
        for variant in _VARIANTS if family in KINDS else _VARIANTS[:2]:
            yield Case(
                f"step/{family}/{variant}",
                lambda f=family, v=variant: _steps(f, v),
                is_fast=_FAST.get(family) == variant,
                rounds_on_amx=variant.rounds_on_amx,
            )


def layered_cases() -> Iterator[Case]:
    """Yield the cases of models that run layer by layer: PyTorch takes part, so that they are not stored."""
    for family in FAMILIES:
        if family not in NATIVE and family not in _NOT_RUN:
            yield Case(f"layers/{family}/w4a8-g32 fp32", lambda f=family: _layers(f), is_stored=False)


#: An int8 KV cache is rejected here: the talker of this model runs layer by layer.
_WITHOUT_INT8 = ("qwen3_omni_moe",)

_BATCH, _TOKENS = 2, 24
#: Tokens whose logits are compared: a head in float of more than 16 rows is computed by PyTorch.
_KEPT = 8
#: The prompt in chunks, the last ones decoded; the last four have the logits that are compared.
_CHUNKS = (11, 5, 3, 1, 1, 3)
_PADDING = 3
#: More tokens than attention merges at once.
_LONG, _LONG_CHUNKS = 150, (77, 65, 5, 1, 1, 1)


class _Model:
    """A model as a case calls it: its logits, or its hidden states where PyTorch computes the head."""

    def __init__(self, model: Any) -> None:
        base = native_base(model)
        if base is None:
            raise ValueError("the native decoder does not run this model; has its family become unsupported?")
        self.model = model
        self.has_head = has_native_head(model)
        self._called = model if self.has_head else base
        self.config = base.config
        self.output = "logits" if self.has_head else "hidden states"

    def run(self, ids: Tensor, chunks: tuple[int, ...], padding: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the results of the last tokens [B, kept, ..] and all that the KV cache holds."""
        cache, results, first = DynamicCache(config=self.config), [], 0
        mask = None if padding is None else (torch.arange(ids.shape[1]) >= padding[:, None]).long()
        for count in chunks:
            last = first + count
            options: dict[str, Any] = {"past_key_values": cache}
            if mask is not None:
                options["attention_mask"] = mask[:, :last]
                options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]
            if self.has_head:
                options["logits_to_keep"] = min(_KEPT, count)
            out = self._called(input_ids=ids[:, first:last], **options)
            results.append((out.logits if self.has_head else out.last_hidden_state)[:, -_KEPT:])
            first = last
        return torch.cat(results, 1)[:, -_KEPT:], _held(cache)

    def run_pages(self, ids: Tensor) -> Tensor:
        """Return the logits of a step over pages that lie anywhere, all rows at once."""
        native, page_tokens = native_with_head(self.model), 16
        batch, tokens = ids.shape
        per = -(-tokens // page_tokens)
        pages = torch.arange(batch * per, dtype=torch.int32).flip(0).view(batch, per).contiguous()
        places = torch.arange(tokens).repeat(batch)
        wanted = torch.cat([torch.arange(i * tokens + tokens - _KEPT, (i + 1) * tokens) for i in range(batch)])
        sequences = torch.arange(batch).repeat_interleave(tokens)
        caches = native.new_pages(batch * per, page_tokens, batch)
        out = native.step_rows(self.model, ids.flatten(), sequences, places, pages, page_tokens, caches, wanted)
        return out.view(batch, _KEPT, -1)


def _held(cache: DynamicCache) -> list[Tensor]:
    """Return keys and values, or states, of all layers. States may be held in dictionaries."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            found += [
                part for part in (held.values() if isinstance(held, dict) else [held]) if isinstance(part, Tensor)
            ]
    return found


def _ids(tokens: int) -> Tensor:
    return integers("ids", 3, 98, _BATCH, tokens)


def _int8_model(model: Any) -> _Model:
    """Return a copy that holds its KV cache in int8."""
    copied = copy.deepcopy(model)
    with RoundedOnce(), torch.no_grad():  # a copy makes its RoPE tables in its first call
        part = copied if has_native_head(model) else None
        if part is None:
            paths = {name for name, module in model.named_modules() if module is native_base(model)}
            part = copied.get_submodule(paths.pop())
        part(input_ids=_ids(2))
    hold_caches(copied, "int8")
    return _Model(copied)


def _steps(family: str, variant: Variant) -> Compute:
    source = packed_model(family, variant.scheme, variant.linears, DTYPES[variant.dtype])
    models = {"": _Model(source)}
    if family not in _WITHOUT_INT8:
        models["int8 KV cache, "] = _int8_model(source)
    ids, padding = _ids(_TOKENS), torch.tensor([_PADDING, 0])

    def compute(recorder: Recorder) -> None:
        for kind, model in models.items():
            results = f"{kind}prompt/{model.output}"
            out, held = model.run(ids, (_TOKENS,))
            recorder.add(results, out)
            recorder.add(f"{kind}prompt/KV cache", *held)
            out, held = model.run(ids, _CHUNKS)
            recorder.add(results, out, variant="in chunks")
            recorder.add(f"{kind}prompt/KV cache", *held, variant="in chunks")
            alone = torch.cat([model.run(row, (16, 8))[0] for row in ids.split(1)])
            recorder.add(results, alone, variant="sequences alone")
            if model.has_head:
                recorder.add(results, model.run_pages(ids), variant="pages")
            padded = f"{kind}left padding/{model.output}"
            recorder.add(padded, model.run(ids, (_TOKENS,), padding)[0])
            recorder.add(padded, model.run(ids, _CHUNKS, padding)[0], variant="in chunks")
            if family in KINDS:
                long = f"{kind}long prompt/{model.output}"
                recorder.add(long, model.run(_ids(_LONG), (_LONG,))[0])
                recorder.add(long, model.run(_ids(_LONG), _LONG_CHUNKS)[0], variant="in chunks")
        if variant.linears is None and models[""].has_head:
            recorder.add_unstored("head in PyTorch/logits", source(input_ids=ids).logits)

    return compute


def _layers(family: str) -> Compute:
    model = cpumoe.accelerate(exact_model(family), "w4a8-g32")
    ids = _ids(_TOKENS)

    def compute(recorder: Recorder) -> None:
        recorder.add_unstored("logits", logits_of(model, family, ids))

    return compute
