"""Measures how good a model is on a text: its perplexity, and how far a quantised model is from the float one.

The text is read in windows of tokens that overlap. Every token but the first is predicted exactly once, from all tokens
before it in its window. However long the text is, memory only has to hold the logits of one window.

Whoever watches the experts of a model takes its native decoder out: it then runs layer by layer, which rounds in other
places. Experts are watched in a run of their own there, so that a perplexity is the same with and without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cpumoe.evaluation.expert_load import ExpertLoad, experts_modules, watching_experts
from cpumoe.option_values import DEFAULT_WINDOW

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int], None]  # called with the predictions done and the predictions in all

# Rows of logits that are turned into float64 at a time: 16 x 200 000 tokens of vocabulary are 26 MB.
_ROWS = 16


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicted a text.

    Attributes:
        nats: minus the sum of the log probabilities of the predicted tokens.
        tokens: the number of tokens predicted, which is all but the first.
        bytes: the length of the whole text in UTF-8.
        seconds: the time spent in the model's forward passes.
        window: the most tokens that the model saw at a time.
        stride: tokens between the ends of two windows; where windows overlap, tokens are computed twice.
    """

    nats: float
    tokens: int
    bytes: int
    seconds: float
    window: int
    stride: int

    @property
    def perplexity(self) -> float:
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf  # exp(710) raises OverflowError

    @property
    def bits_per_token(self) -> float:
        return self.nats / math.log(2) / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of forward pass."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, float | None]:
        return {
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,  # JSON has no infinity
            "bits_per_byte": self.bits_per_byte,
            "bits_per_token": self.bits_per_token,
            "tokens_per_second": self.tokens_per_second,
            **asdict(self),
        }


@dataclass(frozen=True)
class RoutingAgreement:
    """How far two models agree on the experts of one layer.

    Attributes:
        shared: the share of the float model's experts that the other model chose too, as a mean over the tokens.
        exact: the share of the tokens for which both models chose the same set.
    """

    shared: float
    exact: float


@dataclass(frozen=True)
class Comparison:
    """A model compared with the float model that it was made of, on one text.

    Attributes:
        model, float_model: how well each predicted the text.
        kl: KL(float || model) in nats, as a mean over the tokens.
        top1_agreement: the share of the tokens for which both find the same token most likely.
        routing: agreement on the experts, by layer; only layers whose routing can be seen in both models.
    """

    model: Evaluation
    float_model: Evaluation
    kl: float
    top1_agreement: float
    routing: dict[str, RoutingAgreement]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "float_model": self.float_model.to_json(),
            "kl": self.kl,
            "top1_agreement": self.top1_agreement,
            "routing": [{"layer": layer, **asdict(agreement)} for layer, agreement in self.routing.items()],
        }


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
    expert_load: ExpertLoad | None = None,
) -> Evaluation:
    """Measures how well a model predicts a text.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer; it adds its special tokens, such as a begin-of-text token.
        text: at least two tokens long.
        window: the most tokens that the model sees at a time, from 1 to its number of positions. None means 1024, or
            the number of positions if that is smaller.
        stride: tokens between the ends of two windows, from 1 to ``window``. None means half a window. Except at the
            beginning of the text, every token is predicted from more than ``window - stride`` tokens. A smaller stride
            gives more context and takes longer.
        progress: called after every window with the predictions done and the predictions in all.
        expert_load: counts which experts the model uses.
    """
    ids = _encode(model, tokenizer, text)
    window, stride = _window_and_stride([model], window, stride)
    nats = seconds = 0.0
    with _inference(model):
        for span in _spans(len(ids), window, stride):
            span_nats, span_seconds = _read_span(model, ids, span, expert_load)
            nats, seconds = nats + span_nats, seconds + span_seconds
            if progress is not None:
                progress(span.end, len(ids) - 1)
    return Evaluation(nats, len(ids) - 1, len(text.encode()), seconds, window, stride)


def compare(
    model: PreTrainedModel,
    float_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
    expert_load: ExpertLoad | None = None,
) -> Comparison:
    """Measures how far a model is from the float model that it was made of.

    Both models read the same windows. Each prediction counts once, and so does the routing of the token that it is made
    from. The arguments are the same as for :func:`perplexity`.
    """
    sizes = [m.config.get_text_config().vocab_size for m in (model, float_model)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the model has a vocabulary of {sizes[0]}, the float model of {sizes[1]}: they must be equal")
    ids = _encode(model, tokenizer, text)
    window, stride = _window_and_stride([model, float_model], window, stride)
    totals = _Totals()
    count = len(ids) - 1
    with _inference(model), _inference(float_model):
        for span in _spans(len(ids), window, stride):
            _compare_span(model, float_model, ids, span, totals, expert_load)
            if progress is not None:
                progress(span.end, count)
    ours, theirs = (
        Evaluation(nats, count, len(text.encode()), seconds, window, stride)
        for nats, seconds in zip(totals.nats, totals.seconds, strict=True)
    )
    routing = {
        layer: RoutingAgreement(totals.shared[layer] / count, totals.exact[layer] / count) for layer in totals.shared
    }
    return Comparison(ours, theirs, totals.kl / count, totals.top1 / count, routing)


class _Span(NamedTuple):
    """One window: tokens ``begin`` to ``end - 1`` are read; the last ``scored`` predict the tokens up to ``end``."""

    begin: int
    end: int
    scored: int


def _spans(tokens: int, window: int, stride: int) -> Iterator[_Span]:
    """The windows of a text. All are full, even the last one, unless the whole text is shorter than a window."""
    done = 0
    while done < tokens - 1:
        end = min(done + (stride if done else window), tokens - 1)
        yield _Span(max(0, end - window), end, end - done)
        done = end


def _read_span(model: PreTrainedModel, ids: Tensor, span: _Span, expert_load: ExpertLoad | None) -> tuple[float, float]:
    """Nats of the tokens that one window predicts, and seconds. Its logits are freed before the next window begins."""
    output = _forward(model, ids, span, None if expert_load is None else expert_load.add)
    nats = 0.0
    for log_q, targets in zip(_log_probabilities(output.logits), _targets(ids, span), strict=True):
        nats -= _total(log_q, targets)
    _check_finite(nats, span)
    return nats, output.seconds


@dataclass
class _Totals:
    """Sums over the predictions. Lists have two entries: for the model and for the float model."""

    nats: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kl: float = 0.0
    top1: float = 0.0
    shared: dict[str, float] = field(default_factory=dict)
    exact: dict[str, float] = field(default_factory=dict)


def _compare_span(
    model: PreTrainedModel,
    float_model: PreTrainedModel,
    ids: Tensor,
    span: _Span,
    totals: _Totals,
    expert_load: ExpertLoad | None,
) -> None:
    """Runs both models on one window and adds the results to the totals."""
    routing: list[dict[str, Tensor]] = [{}, {}]

    def see(layer: str, topk_ids: Tensor) -> None:
        routing[0][layer] = topk_ids[-span.scored :].clone()
        if expert_load is not None:
            expert_load.add(layer, topk_ids)

    def see_float(layer: str, topk_ids: Tensor) -> None:
        routing[1][layer] = topk_ids[-span.scored :].clone()

    # One after the other, because both may be the same object.
    outputs = [_forward(model, ids, span, see), _forward(float_model, ids, span, see_float)]
    pieces = (_log_probabilities(output.logits) for output in outputs)
    for log_q, log_p, targets in zip(*pieces, _targets(ids, span), strict=True):
        totals.nats[0] -= _total(log_q, targets)
        totals.nats[1] -= _total(log_p, targets)
        terms = log_p.exp() * (log_p - log_q)
        # A token that the float model excludes (minus infinity) adds nothing, but the product would be NaN.
        totals.kl += float(terms.where(log_p > -math.inf, 0.0).sum())
        totals.top1 += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    for i, output in enumerate(outputs):
        totals.seconds[i] += output.seconds
        _check_finite(totals.nats[i], span)
    chosen, float_chosen = routing
    for layer in chosen:
        if layer not in float_chosen:
            continue
        same = float_chosen[layer][:, :, None] == chosen[layer][:, None, :]  # [scored, K, K]
        found, known = same.any(2), same.any(1)
        totals.shared[layer] = totals.shared.get(layer, 0.0) + float(found.double().mean(1).sum())
        totals.exact[layer] = totals.exact.get(layer, 0.0) + float((found.all(1) & known.all(1)).sum())


class _Output(NamedTuple):
    logits: Tensor  # [scored, vocabulary]
    seconds: float


def _forward(
    model: PreTrainedModel, ids: Tensor, span: _Span, see: Callable[[str, Tensor], None] | None = None
) -> _Output:
    """Runs a model on one window. ``see`` gets the layer and the ids of each call of its experts, if it has some."""

    def call() -> tuple[Tensor, float]:
        start = time.perf_counter()
        output = model(input_ids=ids[None, span.begin : span.end], use_cache=False, logits_to_keep=span.scored)
        return output.logits, time.perf_counter() - start

    if see is None or not experts_modules(model):
        logits, seconds = call()
    elif _runs_natively(model):
        logits, seconds = call()
        with watching_experts(model, see):
            call()
    else:
        with watching_experts(model, see):
            logits, seconds = call()
    return _Output(logits[0, -span.scored :], seconds)


def _runs_natively(model: PreTrainedModel) -> bool:
    from cpumoe.integrations.transformers.adapter import native_of, native_with_head

    return native_with_head(model) is not None or any(native_of(module) is not None for module in model.modules())


def _log_probabilities(logits: Tensor) -> Iterator[Tensor]:
    """Log probabilities [rows, vocabulary] of a few rows at a time, in float64: a small KL needs that precision."""
    for rows in logits.split(_ROWS):
        yield rows.double().log_softmax(-1)


def _targets(ids: Tensor, span: _Span) -> Iterator[Tensor]:
    """The tokens to predict, split in the same way as the log probabilities."""
    yield from ids[span.end - span.scored + 1 : span.end + 1].split(_ROWS)


def _total(log_probabilities: Tensor, targets: Tensor) -> float:
    """Sum of the log probabilities [rows, vocabulary] of the targets [rows]."""
    return float(log_probabilities.gather(-1, targets[:, None]).sum())


def _check_finite(nats: float, span: _Span) -> None:
    if not math.isfinite(nats):
        raise RuntimeError(
            f"the model's predictions of tokens {span.end - span.scored + 1} to {span.end} are not finite: "
            "its weights are damaged, or its dtype overflows"
        )


def _encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """The tokens of a text, [tokens] int64."""
    # verbose=False: no warning about a text longer than the model's positions, since it is read in windows.
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; 2 or more are accepted, since the first is not predicted")
    vocabulary = model.config.get_text_config().vocab_size
    if int(ids.max()) >= vocabulary:
        raise ValueError(f"the tokenizer gives the id {int(ids.max())}, the model has a vocabulary of {vocabulary}")
    return ids.to(model.device)


def _window_and_stride(models: list[PreTrainedModel], window: int | None, stride: int | None) -> tuple[int, int]:
    """The window and the stride, with the defaults for these models where None was given; raises for bad values."""
    known = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    positions = min((count for count in known if count is not None), default=None)
    if window is None:
        window = min(DEFAULT_WINDOW, positions or DEFAULT_WINDOW)
    if window < 1 or (positions is not None and window > positions):
        most = "or more" if positions is None else f"to {positions} (the model's positions)"
        raise ValueError(f"window={window}; 1 {most} is accepted")
    if stride is None:
        stride = max(1, window // 2)
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride}; 1 to {window} (the window) is accepted")
    return window, stride


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Switches off gradients and dropout inside the block."""
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            model.train()
