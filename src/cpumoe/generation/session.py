"""Answers prompts piece by piece, and keeps the cache of keys and values for the next prompt."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cpumoe.generation.answer_marks import AnswerMarks
from cpumoe.generation.choice import Choice
from cpumoe.generation.stop_strings import StopAutomaton
from cpumoe.generation.text import Delta, PlainMessage
from cpumoe.steps.sampling import Token
from cpumoe_command import interrupts_raised

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import DynamicLayer


@dataclass
class Answer:
    """The answer to a prompt. ``prefilled`` counts the tokens of the prompt that were not in the cache already.

    If the answer was read as that of a chat, ``reasoning`` is apart from ``text``.
    """

    prompt_tokens: int
    prefilled: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish: str = "length"  # "stop" at an end-of-text token or a stop string, "interrupt" by Ctrl-C
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None if nothing was measured."""
        return self.prefilled / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        # The first token is part of the prefill.
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else None

    def summary(self) -> str:
        rates = [f"{rate:.1f}" if rate is not None else "-" for rate in (self.prefill_rate, self.decode_rate)]
        return (
            f"{self.prompt_tokens} prompt tokens, {len(self.tokens)} generated; prefill {rates[0]} tokens/s, "
            f"decode {rates[1]} tokens/s; peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
        )


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Session:
    """A model with the keys and values of its last prompt, so that the same beginning is not computed again."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        stops: Sequence[str] = (),
    ) -> None:
        """``options`` are arguments of ``generate``; the model's generation_config has the defaults."""
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        theirs = getattr(model.generation_config, "stop_strings", None) or []
        self._stops = StopAutomaton((*stops, *([theirs] if isinstance(theirs, str) else theirs)))
        self._marks = AnswerMarks(model, tokenizer)
        self._cache: Cache | None = None
        self._cached: list[int] = []  # the tokens that the cache holds

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        on_text: Callable[[str], None],
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answers ``prompt``, giving each piece of text to ``on_text``. Ctrl-C ends the answer, not the session.

        With ``on_reasoning`` the prompt is a rendered chat; reasoning goes there and is not part of the text.
        """
        cache, reused = self._take_cache(prompt)
        answer = Answer(len(prompt), len(prompt) - reused)
        message = PlainMessage() if on_reasoning is None else self._marks.message(prompt)
        choice, clock = Choice(0, self._tokenizer, self._stops, message, self._marks.ends), _Clock()

        def show(delta: Delta) -> None:
            if delta.reasoning and on_reasoning is not None:
                on_reasoning(delta.reasoning)
            if delta.content:
                on_text(delta.content)

        def see(new: list[int]) -> bool:
            clock.token()
            answer.tokens.extend(new)
            for token in new:
                show(choice.add(Token(token)))
            return choice.finish is not None

        tokens = torch.tensor([prompt])
        try:
            with interrupts_raised() as interrupts:
                self._model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    past_key_values=cache,
                    max_new_tokens=max_new_tokens,
                    stopping_criteria=[_EachToken(len(prompt), lambda new: see(new) or interrupts.seen)],
                    **{
                        **self._options,
                        "eos_token_id": sorted(self._marks.ends) or None,
                        "stop_strings": None,  # they are searched in the text, where tokens need not end with them
                    },
                )
            if interrupts.seen:
                answer.finish = "interrupt"
            elif answer.tokens and answer.tokens[-1] in self._marks.ends:
                answer.finish = "stop"
        except KeyboardInterrupt:
            answer.finish = "interrupt"
        answer.prefill_seconds, answer.decode_seconds = clock.prefill, clock.decode
        show(choice.end("length"))
        answer.text, answer.reasoning = choice.content, choice.reasoning
        if choice.finish == "stop":
            answer.finish = "stop"
        self._keep_cache(cache, prompt + answer.tokens, whole=answer.finish != "interrupt")
        return answer

    def _take_cache(self, prompt: list[int]) -> tuple[Cache, int]:
        """The cache, cut to the beginning that it shares with ``prompt``, and the length of that."""
        from transformers import DynamicCache

        cache, cached = self._cache, self._cached
        self._cache, self._cached = None, []  # so that an error leaves no wrong cache behind
        common = 0
        # The last token is always computed, because its logits are needed.
        for mine, theirs in zip(cached, prompt[:-1], strict=False):
            if mine != theirs:
                break
            common += 1
        if cache is not None and common and _cut(cache, common):
            return cache, common
        return DynamicCache(config=self._model.config), 0

    def _keep_cache(self, cache: Cache, tokens: list[int], *, whole: bool) -> None:
        # An interrupt may come between two layers. Then the cache must be cut so that all layers have the same length.
        if not whole and _key_value_layers(cache) is None:
            return
        lengths = [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]
        length = min(len(tokens), *lengths) if lengths else 0
        if length and _cut(cache, length):
            self._cache, self._cached = cache, tokens[:length]


def _key_value_layers(cache: Cache) -> list[DynamicLayer] | None:
    """The layers if all of them keep keys and values, else None: a running state cannot be cut to fewer tokens."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    carried = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return None if carried or len(layers) < len(cache.layers) else layers


def _cut(cache: Cache, length: int) -> bool:
    """Cuts every layer to ``length`` tokens. Returns False if that is impossible; the cache is then useless."""
    if all(layer.get_seq_length() == length for layer in cache.layers if hasattr(layer, "get_seq_length")):
        return True
    layers = _key_value_layers(cache)
    if layers is None or any(layer.get_seq_length() < length for layer in layers):
        return False
    try:
        for layer in layers:
            layer.crop(length - layer.get_seq_length())
    except RuntimeError:  # a sliding window no longer has the tokens that a shorter text needs
        return False
    return True


class _Clock:
    """Seconds up to the first token (prefill), and from the first to the last (decode)."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.prefill = 0.0
        self.decode = 0.0

    def token(self) -> None:
        passed = time.perf_counter() - self._start
        if self.prefill == 0.0:
            self.prefill = passed
        self.decode = passed - self.prefill


class _EachToken:
    """A stopping criterion for ``generate``: calls ``see`` with each new token, which says whether to stop."""

    def __init__(self, prompt_tokens: int, see: Callable[[list[int]], bool]) -> None:
        self._seen = prompt_tokens
        self._see = see

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """``input_ids`` is [1, tokens]; the answer is [1] bool."""
        new = [int(token) for token in input_ids[0, self._seen :]]
        self._seen += len(new)
        return torch.tensor([self._see(new)], device=input_ids.device)
