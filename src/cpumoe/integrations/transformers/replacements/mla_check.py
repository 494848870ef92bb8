"""Comparing a latent attention in its absorbed form with the code that it replaces, on random input."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.replacements.module_view import ModuleView

if TYPE_CHECKING:
    from cpumoe.integrations.transformers.replacements.mla import AbsorbedAttention

_BATCH = 2
_STEPS = (5, 3, 1)  # new tokens of the calls that follow each other: an empty cache, and a filled one

# Largest distance of results, as a share of their size. The replaced code rounds keys, values and weights of the
# attention to the dtype of the model; another structure is off by far more.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Modules of a kind differ in their weights and their layer alone: comparing one of them is enough."""
    settings = {
        name: value
        for name, value in vars(module).items()
        if name != "layer_idx" and isinstance(value, int | float | str | None)
    }
    children = tuple((name, type(child)) for name, child in module.named_children())
    return type(module), _dtype_of(module), children, tuple(sorted(settings.items(), key=lambda item: item[0]))


def first_difference(model: nn.Module, name: str, module: Any, absorbed: AbsorbedAttention) -> str | None:
    """What differs between a latent attention and its absorbed form, or None."""
    dtype = _dtype_of(module)
    if dtype not in _TOLERANCES or module.kv_b_proj.in_features != module.kv_lora_rank:
        return f"its weights are {dtype}"
    if any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers())):
        return "its weights are not in CPU memory"
    training = module.training
    module.train(False)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return _compare(model, name, module, absorbed, dtype)
    except Exception as error:  # the module is another one than it looks like
        return f"it cannot be called as others are ({type(error).__name__}: {error})"
    finally:
        module.train(training)


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of the states that a module is given."""
    norm = getattr(module, "kv_a_layernorm", None)
    parameters = [*(norm or module).parameters(), *module.parameters()]
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


def _compare(model: nn.Module, name: str, module: Any, absorbed: AbsorbedAttention, dtype: torch.dtype) -> str | None:
    before = ModuleView(module, "eager")
    calls = _Calls(model, name, module, dtype)
    few_tokens = absorbed.few_tokens
    for padding in (False, True):
        caches = (calls.cache(), calls.cache())
        seen = 0
        for new in _STEPS:
            absorbed.few_tokens = few_tokens if seen else 0  # the first ones as if they were many
            arguments = calls.arguments(before, caches[0], seen, new, padding)
            expected = _run(before, arguments, caches[0])
            got = _run(absorbed, arguments, caches[1])
            seen += new
            pairs = [("output", got, expected), *_contents(caches[1], caches[0], module.layer_idx)]
            for what, ours, theirs in pairs:
                distance = _distance(ours, theirs)
                if not distance <= _TOLERANCES[dtype]:
                    absorbed.few_tokens = few_tokens
                    return f"the {what} after {seen} tokens differs by {distance:.2g} of its size"
    absorbed.few_tokens = few_tokens
    return None


def _run(view: ModuleView, arguments: dict[str, Any], cache: Any) -> Tensor:
    shared = arguments.get("shared_kv_states")
    own = {"past_key_values": cache} | ({} if shared is None else {"shared_kv_states": dict(shared)})
    result = view.run(**(arguments | own))
    output: Tensor = result[0]
    return output


def _contents(ours: Any, theirs: Any, layer: int) -> list[tuple[str, Tensor, Tensor]]:
    """The cached tensors of a layer; one that reads another layer's cache has none."""
    both = [cache.layers[layer] if layer < len(cache.layers) else None for cache in (ours, theirs)]
    if any(getattr(held, "keys", None) is None for held in both):
        return []
    return [(f"cache of {name}", *(getattr(held, name) for held in both)) for name in ("keys", "values")]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    size = float(theirs.float().norm())
    return float((ours.float() - theirs.float()).norm()) / (size or 1.0)


class _Calls:
    """Arguments of a module's forward, by their names, made as the model around it makes them."""

    def __init__(self, model: nn.Module, name: str, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.names = inspect.signature(type(module).forward).parameters.keys()
        self.rotary = _nearest(model, name, "rotary_emb")
        self.flat_mask = False

    def cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config)

    def arguments(self, view: ModuleView, cache: Any, seen: int, new: int, padding: bool) -> dict[str, Any]:
        """Those of a call with ``new`` tokens behind ``seen``; with padding the first sequence has one token less."""
        tokens = seen + new
        positions = torch.arange(seen, tokens).expand(_BATCH, -1)
        hidden = torch.randn(_BATCH, new, self.module.hidden_size).to(self.dtype)
        made: dict[str, Any] = {"hidden_states": hidden, "position_ids": positions}
        if "position_embeddings" in self.names:
            made["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        if "shared_kv_states" in self.names:
            made["shared_kv_states"] = {kind: self._latents(tokens) for kind in ("rope", "nope")}
        if "prev_topk_indices" in self.names and getattr(self.module, "indexer", None) is None:
            made["prev_topk_indices"] = torch.arange(tokens, dtype=torch.int32).expand(_BATCH, new, -1)
        made = {name: value for name, value in made.items() if name in self.names}
        if not self.flat_mask:
            made["attention_mask"] = self._mask(seen, new, padding)
            if seen or self._runs(view, made):
                return made
            self.flat_mask = True  # a mask of padding alone, from which the module makes its own
        flat = torch.ones(_BATCH, new, dtype=torch.bool)
        flat[0, 0] = not (padding and seen == 0)
        return made | {"attention_mask": flat}

    def _runs(self, view: ModuleView, arguments: dict[str, Any]) -> bool:
        try:
            _run(view, arguments, self.cache())
        except (RuntimeError, IndexError, ValueError):
            return False
        return True

    def _mask(self, seen: int, new: int, padding: bool) -> Tensor:
        """[B, 1, new, seen + new], numbers to add. Padding sees itself, so that every query sees a token."""
        look = torch.ones(new, seen + new, dtype=torch.bool).tril(seen).repeat(_BATCH, 1, 1)
        if padding:
            look[0, :, 0] = False
            if seen == 0:
                look[0, 0, 0] = True
        mask = torch.zeros(look.shape, dtype=self.dtype).masked_fill_(~look, torch.finfo(self.dtype).min)
        return mask.unsqueeze(1)

    def _latents(self, tokens: int) -> tuple[Tensor, Tensor]:
        widths = (self.module.kv_lora_rank, self.module.qk_rope_head_dim)
        latents, rotated = (torch.randn(_BATCH, 1, tokens, width).to(self.dtype) for width in widths)
        return latents, rotated


def _nearest(model: nn.Module, name: str, attribute: str) -> Any:
    """The attribute of the innermost module around ``name`` that has it, or None."""
    parts = name.split(".")
    for count in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:count]))
        if (found := getattr(around, attribute, None)) is not None:
            return found
    return None
