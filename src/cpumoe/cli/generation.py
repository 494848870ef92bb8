"""What ``generate``, ``chat`` and ``serve`` share: options, loading a model, and answering a prompt piece by piece."""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import DynamicLayer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")

# Stands for bytes that are no character yet; the rest of it may be in the next token.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a checkpoint, float or quantised")
    parser.add_argument("--scheme", help="quantise the experts of a float checkpoint (w4a8-g128, ...; float: do not)")
    parser.add_argument("--linears", metavar="SCHEME", help="quantise its other linears too")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the packed weights here for the next start")


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least_one,
        default=max_new_tokens,
        metavar="N",
        help=f"length of an answer at most ({max_new_tokens})",
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="F", help="above 0: sample; 0: the likeliest token (0)"
    )
    parser.add_argument("--top-p", type=_probability, metavar="F", help="sample from this share (the model's own)")
    parser.add_argument("--top-k", type=_at_least_one, metavar="N", help="sample from the best N (the model's own)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling")


def _at_least_one(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number from 1 is accepted")
    return number


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _temperature(text: str) -> float:
    value = _real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; a number from 0 is accepted")
    return value


def _probability(text: str) -> float:
    value = _real(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a number above 0 and up to 1 is accepted")
    return value


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling arguments in the words of ``generate``; seeds torch."""
    if arguments.seed is not None:
        try:
            torch.manual_seed(arguments.seed)
        except (RuntimeError, ValueError, OverflowError):
            raise ValueError(f"--seed {arguments.seed}; 64-bit numbers are accepted") from None
    if arguments.temperature > 0:
        given = {"top_p": arguments.top_p, "top_k": arguments.top_k}
        return {
            "do_sample": True,
            "temperature": arguments.temperature,
            **{name: value for name, value in given.items() if value is not None},
        }
    for name in ("top_p", "top_k", "seed"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --temperature above 0")
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def check_folder(folder: Path) -> None:
    """Raises for what is no checkpoint with a tokenizer, before anything is loaded."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; a downloaded checkpoint is needed")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: there is no config.json, so this is no checkpoint")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder}: there is no tokenizer ({', '.join(_TOKENIZER_FILES)})")


def prepare_transformers() -> None:
    """Imports transformers so that it stays off the network and writes nothing between our lines."""
    # Read once, when huggingface_hub and transformers are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise RuntimeError("this command needs transformers: pip install 'cpumoe[transformers]'") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as problem:  # tokenizers raises plain Exception for a damaged file
        raise ValueError(f"{folder}: the tokenizer cannot be read: {problem}") from problem


def load_model(arguments: argparse.Namespace, **options: Any) -> PreTrainedModel:
    """The model that the arguments name; ``options`` are those of ``from_pretrained``."""
    from cpumoe.plugins.transformers import load_model

    return load_model(
        arguments.model, scheme=arguments.scheme, linears=arguments.linears, cache=arguments.cache, **options
    )


def is_decoded(text: str) -> bool:
    """False where Python has put surrogates for bytes that are not UTF-8 (arguments, or stdin in the C locale)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def context_length(folder: Path) -> int | None:
    """Tokens that the model was made for, or None where its configuration does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Tokens of a conversation up to where the answer begins."""
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; cpumoe generate takes plain text")
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
    except Exception as problem:  # templates raise what they like: jinja's errors, TypeError, ...
        raise ValueError(f"the model's chat template refuses this conversation: {problem}") from problem
    return [token for token in tokens if isinstance(token, int)]


class TextPieces:
    """Turns tokens into text as they come, so that the pieces joined are the text of all tokens.

    A character may be spread over several tokens. Whatever ends in an unfinished one is held back until it is finished
    or until ``rest`` is called.
    """

    _WINDOW = 64  # tokens decoded again for each new one, at most while all characters are finished
    _CONTEXT = 8  # tokens kept before a cut, since what a token means depends on its neighbours

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # characters of these tokens' text that have been given out

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        finished = text.rstrip(_UNFINISHED)
        piece = finished[self._shown :]
        self._shown += len(piece)
        if len(self._tokens) >= self._WINDOW and self._shown == len(text):
            context = self._tokens[-self._CONTEXT :]
            context_text = self._decode(context)
            if _UNFINISHED not in context_text and text.endswith(context_text):
                self._tokens, self._shown = context, len(context_text)
        return piece

    def rest(self) -> str:
        """What was held back, with replacement characters for what never became one."""
        piece = self._decode(self._tokens)[self._shown :]
        self._tokens, self._shown = [], 0
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


@dataclass
class Answer:
    """What came of a prompt. ``prefilled`` counts the prompt's tokens that were not in the cache already."""

    prompt_tokens: int
    prefilled: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"  # "stop" at an end-of-text token, "interrupt" by Ctrl-C
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None where nothing was measured."""
        return self.prefilled / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        # The first token comes with the prefill.
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
    """A model, and the keys and values of what it read last, so that a prompt that begins alike is not read twice."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        own = model.generation_config
        # Where neither the user nor the model says, transformers would sample from the best 50.
        neutral = {"top_k": 0, "top_p": 1.0} if options["do_sample"] else {}
        unsaid = {name: value for name, value in neutral.items() if getattr(own, name, None) is None}
        self._options = {**unsaid, **options}
        ends = getattr(own, "eos_token_id", None)
        self._ends = set(ends) if isinstance(ends, list) else {ends}
        self._cache: Cache | None = None
        self._cached: list[int] = []  # the tokens that the cache holds

    def answer(self, prompt: list[int], max_new_tokens: int, on_text: Callable[[str], None]) -> Answer:
        """Answers ``prompt``, giving each piece of text to ``on_text``. Ctrl-C ends the answer, not the session."""
        cache, reused = self._take_cache(prompt)
        answer = Answer(len(prompt), len(prompt) - reused)
        pieces = TextPieces(self._tokenizer)

        def show(piece: str) -> None:
            if piece:
                answer.text += piece
                on_text(piece)

        clock = _Clock()
        tokens = torch.tensor([prompt])
        try:
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                streamer=_Streamer(answer.tokens, clock, lambda new: show(pieces.add(new))),
                **self._options,
            )
            if answer.tokens and answer.tokens[-1] in self._ends:
                answer.finish = "stop"
        except KeyboardInterrupt:
            answer.finish = "interrupt"
        answer.prefill_seconds, answer.decode_seconds = clock.prefill, clock.decode
        show(pieces.rest())
        self._keep_cache(cache, prompt + answer.tokens, whole=answer.finish != "interrupt")
        return answer

    def _take_cache(self, prompt: list[int]) -> tuple[Cache, int]:
        """The cache cut to what it has in common with ``prompt``, and that length."""
        from transformers import DynamicCache

        cache, cached = self._cache, self._cached
        self._cache, self._cached = None, []  # whatever goes wrong from here on leaves no stale cache behind
        common = 0
        # The last token is always computed: its logits are needed.
        for mine, theirs in zip(cached, prompt[:-1], strict=False):
            if mine != theirs:
                break
            common += 1
        if cache is not None and common and _cut(cache, common):
            return cache, common
        return DynamicCache(config=self._model.config), 0

    def _keep_cache(self, cache: Cache, tokens: list[int], *, whole: bool) -> None:
        # An interrupt may come between two layers, and only a cache that can be cut can be made whole again.
        if not whole and _key_value_layers(cache) is None:
            return
        lengths = [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]
        length = min(len(tokens), *lengths) if lengths else 0
        if length and _cut(cache, length):
            self._cache, self._cached = cache, tokens[:length]


def _key_value_layers(cache: Cache) -> list[DynamicLayer] | None:
    """The layers, where all of them keep keys and values: states that are carried forward cannot be taken back."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    carried = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return None if carried or len(layers) < len(cache.layers) else layers


def _cut(cache: Cache, length: int) -> bool:
    """Cuts every layer to ``length`` tokens; False where that cannot be done and the cache is of no more use."""
    if all(layer.get_seq_length() == length for layer in cache.layers if hasattr(layer, "get_seq_length")):
        return True
    layers = _key_value_layers(cache)
    if layers is None or any(layer.get_seq_length() < length for layer in layers):
        return False
    try:
        for layer in layers:
            layer.crop(length - layer.get_seq_length())
    except RuntimeError:  # a sliding window that has moved on has forgotten what a shorter text would need
        return False
    return True


class _Clock:
    """Seconds until the first token, and from there to the last."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.prefill = 0.0
        self.decode = 0.0

    def token(self) -> None:
        passed = time.perf_counter() - self._start
        if self.prefill == 0.0:
            self.prefill = passed
        self.decode = passed - self.prefill


class _Streamer:
    """What ``generate`` hands the prompt and then each token to."""

    def __init__(self, tokens: list[int], clock: _Clock, on_tokens: Callable[[list[int]], None]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._on_tokens = on_tokens
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._clock.token()
        new = [int(token) for token in value.reshape(-1)]
        self._tokens.extend(new)
        self._on_tokens(new)

    def end(self) -> None:
        """Called after the last token; there is nothing left to do."""
