"""Whether a described decoder computes what the model's own code computes.

Both run on a twin of the model with one layer: its own classes, its own packed weights, everything else in fp32, where
rounding hides no difference, and an embedding of a few made-up tokens. A prompt with padding is followed by single
tokens, and a sliding window is short enough to matter.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.decoder_description import (
    Choices,
    cache_form,
    choices_for,
    describe_decoder,
    layer_type,
    mixer_of,
    norm_of,
)
from cpumoe.integrations.transformers.described_parts import NotDescribed
from cpumoe.integrations.transformers.latent_attention import absorbed
from cpumoe.integrations.transformers.linear_attention import state_form
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops import decoder

_TOKENS = 16  # of the made-up embedding
_PROMPT, _PADDING, _SINGLE = 6, 2, 2  # tokens; places of padding before the first sequence; tokens one by one behind
_WINDOW = 3
_TOLERANCE = 5e-3  # relative, of a token's row: bytes of activations may round to their neighbours
_SHARE = 0.7  # of rows within it: a token may have another expert where two have nearly the same score


def find_choices(base: Any, index: int) -> Choices:
    """What cannot be seen of a layer, by trying all that it may be. Raises NotDescribed if nothing fits."""
    twin = _twin(base, index)
    reason = ""
    for choices in choices_for(twin, 0):
        model = describe_decoder(twin, (choices,), _PROMPT + _SINGLE)
        reason = _difference(twin, model)
        if not reason:
            return choices
    raise NotDescribed(f"{type(base.layers[index]).__name__} in one call {reason}")


def output_class(base: Any) -> type[Any]:
    """The class of what the model's own code gives."""
    twin = _twin(base, 0)
    with torch.no_grad():
        return type(twin(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True))


def _difference(twin: Any, model: decoder.DecoderModel) -> str:
    """What the described decoder does differently; empty if nothing."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, _TOKENS, (2, _PROMPT + _SINGLE), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :_PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    core, ours, theirs = decoder.Decoder(model), DynamicCache(config=twin.config), DynamicCache(config=twin.config)
    caches = StepCaches([cache_form(twin.layers[0], model.layers[0], torch.float32)], torch.float32)
    near = []
    past = 0
    for last in (_PROMPT, *range(_PROMPT + 1, _PROMPT + _SINGLE + 1)):
        new = slice(past, last)
        try:
            with torch.no_grad():
                expected = twin(
                    input_ids=ids[:, new],
                    attention_mask=mask[:, :last],
                    position_ids=positions[:, new],
                    past_key_values=theirs,
                ).last_hidden_state
        except Exception as problem:  # a layer that cannot run alone
            return f"could not be compared ({type(problem).__name__}: {problem})"
        caches.past(ours, 2)  # gives its layers room
        room = caches.reserve(ours, 2, last - past)
        assert room is not None  # it was made here
        padding = torch.tensor([_PADDING, 0])
        found = core.step(
            ids[:, new].contiguous(), room, past, positions=positions[:, new].contiguous(), padding=padding
        )
        caches.advance(ours, last - past)
        near += _near_rows(found, expected, mask[:, new].bool())
        past = last
    share = sum(near) / len(near)
    if share < _SHARE:
        return f"gives other numbers ({share:.0%} of the tokens are near)"
    return "" if _same_caches(ours.layers[0], theirs.layers[0]) else "leaves other numbers in its cache"


def _same_caches(ours: Any, theirs: Any) -> bool:
    """Whether both layers of caches hold the same, so that either code can go on from what the other has left."""
    names = ("keys", "values") if hasattr(theirs, "keys") else ("conv_states", "recurrent_states")
    for name in names:
        pair = [getattr(layer, name) for layer in (ours, theirs)]
        one, two = (held[0] if isinstance(held, dict) else held for held in pair)
        if one is None or two is None:
            if one is not two:
                return False
            continue
        if one.shape != two.shape:
            return False
        rows = one.flatten(0, -2), two.flatten(0, -2)
        near = _near_rows(*rows, torch.ones(len(rows[0]), dtype=torch.bool))
        if sum(near) < _SHARE * len(near):
            return False
    return True


def _near_rows(found: Tensor, expected: Tensor, real: Tensor) -> list[bool]:
    errors = (found - expected).double().norm(dim=-1)[real]
    sizes = expected.double().norm(dim=-1)[real]
    near: list[bool] = (errors <= _TOLERANCE * sizes).tolist()
    return near


def _twin(base: Any, index: int) -> Any:
    """A base model with one layer of ``base``, in fp32, and a small embedding."""
    twin = copy.copy(base)
    vars(twin).pop("forward", None)
    config = copy.copy(base.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [layer_type(base, index)]
        if state_form(mixer_of(base.layers[index])) is not None:
            # Of this one there is only a cache, where tokens are counted.
            config.layer_types.append("full_attention")
            config.num_hidden_layers = 2
    if isinstance(getattr(config, "sliding_window", None), int):
        config.sliding_window = _WINDOW
    twin.config = config
    layer = in_fp32(base.layers[index])
    for module in layer.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = 0
        if isinstance(getattr(module, "kv_b_proj", None), QuantizedLinear):
            module.kv_b_proj = _unpacked(module)
    embedding = nn.Embedding(_TOKENS, base.embed_tokens.weight.shape[1], dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    embedding.weight.data = torch.randn(embedding.weight.shape, generator=generator) * 0.05
    twin._modules = {
        **base._modules,
        "embed_tokens": embedding,
        "layers": nn.ModuleList([layer]),
        **{name: in_fp32(module) for name, module in base._modules.items() if module is norm_of(base)},
    }
    return twin


def _unpacked(attention: Any) -> nn.Linear:
    """The expansion of latents in fp32, as the core has it, where rounded activations meet the packed one."""
    view = absorbed(attention)
    if view is None:
        raise NotDescribed(f"its latent attention ({type(attention).__name__}) is none that we know")
    weight = view.weight(torch.float32)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def in_fp32(module: Any) -> Any:
    """A copy of a module with its floats in fp32 and everything else shared, forms with one operator included."""
    twin = copy.copy(module)
    own = vars(module)
    forward = own.get("forward")
    vars(twin).pop("forward", None)
    if isinstance(forward, partial) and forward.args and forward.args[0] is module:
        twin.forward = partial(forward.func, twin, *forward.args[1:], **forward.keywords)

    def as_fp32(tensor: Tensor) -> Tensor:
        return tensor.detach().float() if tensor.is_floating_point() else tensor

    twin._parameters = {
        name: None if parameter is None else nn.Parameter(as_fp32(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    twin._buffers = {name: None if buffer is None else as_fp32(buffer) for name, buffer in module._buffers.items()}
    twin._modules = {name: None if child is None else in_fp32(child) for name, child in module._modules.items()}
    return twin
