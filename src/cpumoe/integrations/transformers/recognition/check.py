"""Check that a recognised decoder computes what the model's own code computes.

Both run on a reduced copy of the model with one layer: its own classes, its own packed weights, everything else in
fp32, where rounding hides no difference, and an embedding of a few made-up tokens. Four sequences are read in chunks,
then token by token: one with left padding, one from position 0 on, one at the borders of RoPE scaling and of the
context, and one whose positions start again. A sliding window is short enough to matter.

Every row must agree, except for those whose experts hang in the balance: a little noise on the input of the MoE block
makes its own router choose others, so that rounding may do so too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.errors import RankError
from cpumoe.integrations.transformers.recognition.build import build
from cpumoe.integrations.transformers.recognition.mixers.kinds import mixer_of, state_form, variants_for
from cpumoe.integrations.transformers.recognition.mixers.mla import expansion_of
from cpumoe.integrations.transformers.recognition.probe import copy_of
from cpumoe.integrations.transformers.recognition.recognize import norm_of, recognize_decoder, refuse_other_parts
from cpumoe.integrations.transformers.recognition.rotary import layer_type
from cpumoe.integrations.transformers.recognition.values import LayerVariant, UnsupportedDecoder
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops import decoder
from cpumoe.ops.decoder_steps import Decoder

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
_ROUNDING, _DRAWS_OF_ROUNDING = 1e-5, 6  # relative noise on inputs, larger than rounding errors of sums in fp32
_MOST_MOVED = 0.25  # of the rows that may differ because a rounding error moves an activation by a step


def find_variant(base: Any, index: int) -> LayerVariant:
    """Find what the parts of a layer do not tell by trying all variants. Raise UnsupportedDecoder if none fits."""
    reduced = _reduced_copy(base, index)
    cases = _Cases(base.config)

    def built(variant: LayerVariant) -> decoder.DecoderModel[Tensor]:
        return build(reduced, recognize_decoder(reduced, [variant]), cases.table)

    built(next(variants_for(reduced, 0)))  # raises for unsupported parts before any runs
    own = _OwnCode(reduced, cases)
    best = _Difference(own.problem)
    for variant in () if own.problem else variants_for(reduced, 0):
        found = _difference(reduced, built(variant), cases, own)
        if found is None:
            return variant
        if found.near >= best.near:
            best = found
    raise UnsupportedDecoder(f"{type(base.layers[index]).__name__} in one call {best.reason}")


@dataclass(frozen=True)
class _Difference:
    """A difference between a built decoder and the model's own code, in words; ``near``: number of rows that agree."""

    reason: str
    near: int = -1


def output_class(base: Any) -> type[Any]:
    """The class of what the model's own code gives."""
    reduced = _reduced_copy(base, 0)
    with torch.no_grad():
        return type(reduced(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True))


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

    def __init__(self, reduced: Any, cases: _Cases) -> None:
        self._reduced, self._cases = reduced, cases
        self._moved: list[tuple[list[Tensor], Any]] = []
        self.hidden: list[Tensor] = []
        self.compared: list[Tensor] = []
        self.problem = ""
        try:
            with torch.no_grad(), _Balance(reduced.layers[0]) as balance:
                for new, hidden in self._run():
                    self.hidden.append(hidden)
                    real = cases.mask[:, new].bool()
                    self.compared.append(real & ~balance.rows(real.numel()).view_as(real))
        except RankError:  # says nothing of the layer
            raise
        except Exception as problem:  # a layer that cannot run alone
            self.problem = f"could not be compared ({type(problem).__name__}: {problem})"
            return
        if (rows := sum(int(compared.sum()) for compared in self.compared)) < _LEAST_ROWS:
            self.problem = f"could not be compared: the router chooses clearly for {rows} tokens only"

    def _run(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tokens of each call and the hidden states that it gives."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self._reduced.config)
        for new in self._cases.chunks():
            out = self._reduced(
                input_ids=self._cases.ids[:, new],
                attention_mask=self._cases.mask[:, : new.stop],
                position_ids=self._cases.positions[:, new],
                past_key_values=self.cache,
            )
            yield new, out.last_hidden_state

    def moved(self) -> Iterator[tuple[list[Tensor], Any]]:
        """Yield hidden states and the cache for inputs that differ by a rounding error, several times.

        A rounding error may move a quantised activation by a step, and with it a row by more than the tolerance.
        """
        weight, cache = self._reduced.embed_tokens.weight, self.cache
        exact = weight.data
        for draw in range(_DRAWS_OF_ROUNDING):
            if draw == len(self._moved):
                noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(draw))
                try:
                    weight.data = exact * (1 + _ROUNDING * noise)
                    with torch.no_grad():
                        self._moved.append(([hidden for _, hidden in self._run()], self.cache))
                finally:
                    weight.data, self.cache = exact, cache
            yield self._moved[draw]


class _ExpertsChosen(Exception):
    """Ends a call of a block before its experts compute."""


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
        self._is_drawing = False  # then only the ids of the experts are needed, not their results
        self._generator = torch.Generator().manual_seed(7)

    def __enter__(self) -> _Balance:
        self._hooks: list[Any] = []
        if self._block is not None and self._experts is not None:
            keep_call = self._block.register_forward_pre_hook(
                lambda _, arguments, options: self._calls.append((arguments, options)), with_kwargs=True
            )
            self._hooks = [keep_call, self._experts.register_forward_pre_hook(self._keep_chosen)]
        return self

    def _keep_chosen(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        ids = arguments[1]
        self._chosen.append(ids.reshape(ids.shape[0], -1).sort().values)
        if self._is_drawing:
            raise _ExpertsChosen

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
        self._is_drawing = len(self._chosen) == 1  # a block that calls its experts more than once runs to its end
        try:
            for _ in range(_DRAWS):
                noise = torch.randn(x.shape, generator=self._generator)
                noise *= _NOISE * x.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
                with suppress(_ExpertsChosen):
                    self._block(x + noise, *others, **options)
                found |= (self._chosen[-1] != chosen).any(1)
        finally:
            self._is_drawing = False
        self._calls.clear()
        self._chosen.clear()
        return found


def _difference(reduced: Any, model: decoder.DecoderModel[Tensor], cases: _Cases, own: _OwnCode) -> _Difference | None:
    """Return what the built decoder does differently; None if nothing."""
    from transformers import DynamicCache

    try:
        core = Decoder(model)
    except ValueError as problem:  # parts that do not go together: the next variant may
        return _Difference(f"is refused: {problem}")
    cache = DynamicCache(config=reduced.config)
    caches = StepCaches(core)
    found_rows: list[Tensor] = []
    for new in cases.chunks():
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
        found_rows.append(found)
    compared = torch.cat([rows.flatten() for rows in own.compared])

    def rows_of(hidden: list[Tensor]) -> Tensor:
        return torch.cat([rows.flatten(0, 1) for rows in hidden])[compared]

    expected = rows_of(own.hidden)
    near = _near(rows_of(found_rows), expected)
    left = _unexplained(near, (_near(rows_of(hidden), expected) for hidden, _ in own.moved()))
    if left or int(near.sum()) < _LEAST_ROWS:
        count, total = int(near.sum()), len(near)
        return _Difference(f"gives other numbers ({count} of {total} rows are near)", count)
    ours, theirs = (_held(layers.layers[0]) for layers in (cache, own.cache))
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        if not _same(*pair, (_held(moved.layers[0])[number] for _, moved in own.moved())):
            return _Difference("leaves other numbers in its cache", int(near.sum()))
    return None


def _unexplained(near: Tensor, moved: Iterator[Tensor]) -> bool:
    """Return whether there are rows that are not near and that no rounding error moves.

    Args:
        near: which rows agree.
        moved: which rows agree with themselves after rounding errors, for several of them.
    """
    left = ~near
    if int(left.sum()) > _MOST_MOVED * len(near):
        return True
    while bool(left.any()):
        if (steady := next(moved, None)) is None:
            return True
        left &= steady
    return False


def _held(layer: Any) -> list[Tensor | None]:
    """Return the tensors of a layer of a cache, from which either code goes on."""
    names = ("keys", "values") if hasattr(layer, "keys") else ("conv_states", "recurrent_states")
    found = (getattr(layer, name) for name in names)
    return [held[0] if isinstance(held, dict) else held for held in found]


def _same(ours: Tensor | None, theirs: Tensor | None, moved: Iterator[Tensor | None]) -> bool:
    """Return whether two tensors of caches hold the same, but for rows that a rounding error moves."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape:
        return False
    steady = (_near(rows, theirs).flatten() for rows in moved if rows is not None)
    return not _unexplained(_near(ours, theirs).flatten(), steady)


def _near(found: Tensor, expected: Tensor) -> Tensor:
    """Return which rows agree."""
    errors = (found - expected).double().norm(dim=-1)
    near: Tensor = errors <= _TOLERANCE * expected.double().norm(dim=-1)
    return near


def _reduced_copy(base: Any, index: int) -> Any:
    """Return a base model with one layer of ``base``, in fp32, and a small embedding. Raise UnsupportedDecoder."""
    refuse_other_parts(base)
    reduced = copy_of(base)
    config = copy.copy(base.config)
    config.num_hidden_layers = 1
    config.return_dict = True
    config.output_hidden_states = config.output_attentions = config.output_router_logits = False
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [layer_type(base, index)]
        if state_form(mixer_of(base.layers[index])) is not None:
            # Of this one there is only a cache, where tokens are counted.
            config.layer_types.append("full_attention")
            config.num_hidden_layers = 2
    if isinstance(getattr(config, "sliding_window", None), int):
        config.sliding_window = _WINDOW
    reduced.config = config
    layer = in_fp32(base.layers[index])
    for module in layer.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = 0
        if isinstance(expansion := getattr(module, "kv_b_proj", None), QuantizedLinear):
            module.kv_b_proj = _unpacked(expansion)
    embedding = nn.Embedding(_TOKENS, base.embed_tokens.weight.shape[1], dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    embedding.weight.data = torch.randn(embedding.weight.shape, generator=generator) * 0.05
    reduced._modules = {
        **base._modules,
        "embed_tokens": embedding,
        "layers": nn.ModuleList([layer]),
        **{name: in_fp32(module) for name, module in base._modules.items() if module is norm_of(base)},
    }
    return reduced


def _unpacked(expansion: QuantizedLinear) -> nn.Linear:
    """Return a kv_b_proj in fp32: the core multiplies its unpacked weight with activations that are not rounded."""
    weight = expansion_of(expansion, torch.float32)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def in_fp32(module: Any) -> Any:
    """Return a copy of a module with its own code, its floats in fp32 and everything else shared."""
    copied = copy_of(module)

    def as_fp32(tensor: Tensor) -> Tensor:
        return tensor.detach().float() if tensor.is_floating_point() else tensor

    copied._parameters = {
        name: None if parameter is None else nn.Parameter(as_fp32(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    copied._buffers = {name: None if buffer is None else as_fp32(buffer) for name, buffer in module._buffers.items()}
    copied._modules = {name: None if child is None else in_fp32(child) for name, child in module._modules.items()}
    return copied
