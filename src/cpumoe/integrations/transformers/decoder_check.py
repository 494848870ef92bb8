"""Checks that a described decoder computes what the model's own code computes.

Both run on a copy of the model with one layer: its own classes, its own packed weights, everything else in fp32, where
rounding hides no difference, and an embedding of a few made-up tokens. Four sequences are read in chunks and then token
by token: one with left padding, one from position 0 on, one at the borders of rotary scaling and of the context, and
one whose positions start again. A sliding window is short enough to matter.

Every row must agree, except for those whose experts hang in the balance: a little noise on the input of the MoE block
makes its own router choose others, so that rounding may do so too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.errors import RankError
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
from cpumoe.integrations.transformers.replacement_check import copy_of
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops import decoder

_TOKENS = 64  # of the made-up embedding
_LENGTH = 16  # tokens of each sequence
_CUTS = (9, 13, 14, 15, 16)  # ends of the chunks that they are read in
_PADDING = 3  # places before the first sequence
_WINDOW = 3
# Relative, of a token's row. Rows that compute the same differ by 1e-6, or by up to 6e-3 of 64 features where an int8
# activation rounds to its neighbour.
_TOLERANCE = 1e-2
_NOISE, _DRAWS = 5e-3, 4  # relative noise on a router's input, and how often it is drawn
_LEAST_ROWS = 6  # that must be left to compare


def find_choices(base: Any, index: int) -> Choices:
    """Find what cannot be seen of a layer by trying all that it may be. Raises NotDescribed if nothing fits."""
    twin = _twin(base, index)
    cases = _Cases(base.config)
    own = _OwnCode(twin, cases)
    reason = own.problem
    if not reason:
        for choices in choices_for(twin, 0):
            reason = _difference(twin, describe_decoder(twin, (choices,), cases.table), cases, own)
            if not reason:
                return choices
    raise NotDescribed(f"{type(base.layers[index]).__name__} in one call {reason}")


def output_class(base: Any) -> type[Any]:
    """The class of what the model's own code gives."""
    twin = _twin(base, 0)
    with torch.no_grad():
        return type(twin(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True))


class _Cases:
    """Sequences to compare: tokens and mask [4, T], and positions as places in ``table``, which has the model's."""

    def __init__(self, config: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, _TOKENS, (4, _LENGTH), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.mask[0, :_PADDING] = 0
        plain = torch.arange(_LENGTH)
        borders = torch.tensor(_border_positions(config))
        self.table = torch.cat((plain, borders))
        self.places = torch.stack((plain - _PADDING, plain, plain + _LENGTH, plain % (_LENGTH // 2))).clamp(min=0)
        self.positions = self.table[self.places]
        self.padding = torch.tensor([_PADDING, 0, 0, 0])

    def chunks(self) -> Iterator[slice]:
        """Yield the tokens of each call."""
        yield from (slice(first, last) for first, last in pairwise((0, *_CUTS)))


def _border_positions(config: Any) -> list[int]:
    """Return ascending positions around the lengths that rotary scaling depends on."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    lengths = {kind.get("original_max_position_embeddings") for kind in kinds}
    lengths |= {getattr(config, "max_position_embeddings", None), 4096}
    found = {0, 1}
    for length in sorted(length for length in lengths if isinstance(length, int) and length > 2)[:3]:
        found |= {length - 1, length, length + 1, 2 * length}
    found |= set(range(max(found) + 1, max(found) + 1 + _LENGTH - len(found)))
    return sorted(found)


class _OwnCode:
    """What the model's own code gives for the cases: hidden states of each chunk, rows to compare, and the cache.

    ``problem`` says why it could not run, or is empty.
    """

    def __init__(self, twin: Any, cases: _Cases) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=twin.config)
        self.hidden: list[Tensor] = []
        self.compared: list[Tensor] = []
        self.problem = ""
        try:
            with torch.no_grad(), _Balance(twin.layers[0]) as balance:
                for new in cases.chunks():
                    out = twin(
                        input_ids=cases.ids[:, new],
                        attention_mask=cases.mask[:, : new.stop],
                        position_ids=cases.positions[:, new],
                        past_key_values=self.cache,
                    )
                    self.hidden.append(out.last_hidden_state)
                    real = cases.mask[:, new].bool()
                    self.compared.append(real & ~balance.rows(real.numel()).view_as(real))
        except RankError:  # says nothing of the layer
            raise
        except Exception as problem:  # a layer that cannot run alone
            self.problem = f"could not be compared ({type(problem).__name__}: {problem})"
            return
        if (rows := sum(int(compared.sum()) for compared in self.compared)) < _LEAST_ROWS:
            self.problem = f"could not be compared: the router chooses clearly for {rows} tokens only"


class _Balance:
    """Finds rows whose experts hang in the balance, in the MoE block of a layer while it runs."""

    def __init__(self, layer: nn.Module) -> None:
        self._block: nn.Module | None = None
        self._experts: Experts | None = None
        for block in layer.modules():
            for child in block.children():
                if isinstance(child, Experts):
                    self._block, self._experts = block, child
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._chosen: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(7)

    def __enter__(self) -> _Balance:
        self._hooks: list[Any] = []
        if self._block is not None and self._experts is not None:
            keep_call = self._block.register_forward_pre_hook(
                lambda _, arguments, options: self._calls.append((arguments, options)), with_kwargs=True
            )
            keep_chosen = self._experts.register_forward_pre_hook(
                lambda _, arguments: self._chosen.append(arguments[1].reshape(arguments[1].shape[0], -1).sort().values)
            )
            self._hooks = [keep_call, keep_chosen]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def rows(self, count: int) -> Tensor:
        """Return which of the ``count`` rows of the last call hang in the balance, bool; none in a dense layer."""
        found = torch.zeros(count, dtype=torch.bool)
        if self._block is None or not self._chosen:
            return found
        (x, *others), options = self._calls[-1]
        chosen = self._chosen[-1]
        for _ in range(_DRAWS):
            noise = torch.randn(x.shape, generator=self._generator)
            noise *= _NOISE * x.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
            self._block(x + noise, *others, **options)
            found |= (self._chosen[-1] != chosen).any(1)
        self._calls.clear()
        self._chosen.clear()
        return found


def _difference(twin: Any, model: decoder.DecoderModel, cases: _Cases, own: _OwnCode) -> str:
    """Return what the described decoder does differently; empty if nothing."""
    from transformers import DynamicCache

    core, cache = decoder.Decoder(model), DynamicCache(config=twin.config)
    caches = StepCaches([cache_form(twin.layers[0], model.layers[0], torch.float32)], torch.float32)
    near: list[bool] = []
    for new, expected, compared in zip(cases.chunks(), own.hidden, own.compared, strict=True):
        caches.past(cache, len(cases.ids))  # gives its layers room
        room = caches.reserve(cache, len(cases.ids), new.stop - new.start)
        assert room is not None  # it was made here
        found = core.step(
            cases.ids[:, new].contiguous(),
            room,
            new.start,
            positions=cases.places[:, new].contiguous(),
            padding=cases.padding,
        )
        caches.advance(cache, new.stop - new.start)
        near += _near_rows(found, expected, compared)
    if not all(near):
        return f"gives other numbers ({sum(near)} of {len(near)} rows are near)"
    return "" if _same_caches(cache.layers[0], own.cache.layers[0]) else "leaves other numbers in its cache"


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
        if not all(_near_rows(*rows, torch.ones(len(rows[0]), dtype=torch.bool))):
            return False
    return True


def _near_rows(found: Tensor, expected: Tensor, real: Tensor) -> list[bool]:
    errors = (found - expected).double().norm(dim=-1)[real]
    sizes = expected.double().norm(dim=-1)[real]
    near: list[bool] = (errors <= _TOLERANCE * sizes).tolist()
    return near


def _twin(base: Any, index: int) -> Any:
    """A base model with one layer of ``base``, in fp32, and a small embedding."""
    twin = copy_of(base)
    config = copy.copy(base.config)
    config.num_hidden_layers = 1
    config.output_hidden_states = config.output_attentions = config.output_router_logits = False
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
    twin = copy_of(module)
    forward = vars(module).get("forward")
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
