"""Sampler: chooses the next token by the logits of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_COLDEST = 1e-5  # at lower temperatures the scores overflow, and only the likeliest token has a chance anyway


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request. Temperature 0 is greedy; all other defaults change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: for the chosen token; N: for the N likeliest too

    @classmethod
    def of_model(cls, config: Any, *, samples: bool | None = None) -> Sampling:
        """Return the settings of a model's GenerationConfig: greedy unless it asks for sampling, as in transformers.

        ``samples``: whether to sample, whatever it asks for.
        """

        def value(name: str, neutral: float) -> float:
            found = getattr(config, name, None)
            return neutral if found is None else found

        penalty = value("repetition_penalty", 1.0)
        if not (config.do_sample if samples is None else samples):
            return cls(repetition_penalty=penalty)
        return cls(
            temperature=value("temperature", 1.0),
            top_k=int(value("top_k", 0)),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            repetition_penalty=penalty,
        )

    def asked(self, temperature: float | None, **others: float | None) -> Sampling:
        """Return these settings, replaced by those that are not None."""
        given = {name: value for name, value in others.items() if value is not None}
        if temperature is None and self.temperature == 0 and given:
            temperature = 1.0  # top_p and the like only mean something if tokens are sampled
        if temperature is not None:
            given["temperature"] = temperature
        return replace(self, **given)  # type: ignore[arg-type]  # the fields' own types were checked


@dataclass(frozen=True)
class Token:
    """One chosen token. ``likeliest`` has pairs of token and log probability, the best first, if they were wanted."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def _largest(scores: Tensor) -> int:
    """The first of the largest scores [vocabulary], or the first NaN.

    NumPy's is ten times as fast as PyTorch's, which also shares the work among threads that may be busy elsewhere.
    """
    return int(scores.numpy().argmax())


class TokenChooser:
    """Chooses the tokens of one sequence, with its own random numbers."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._samples = sampling.temperature >= _COLDEST
        self._generated: Counter[int] = Counter()
        self._seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64) if sampling.repetition_penalty != 1 else None
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, scores: Tensor) -> Token:
        """Return the next token by the logits ``scores`` [vocabulary]. Raise ValueError if they are not finite."""
        scores = scores.to(torch.float32)
        likeliest = _largest(scores)
        best = float(scores[likeliest])
        if not math.isfinite(best):
            raise ValueError("the model's scores are not finite numbers, so no token can be chosen")
        adjusted = self._adjusted(scores)
        chosen = self._sample(adjusted) if self._samples else likeliest if adjusted is scores else _largest(adjusted)
        self._generated[chosen] += 1
        if self._seen is not None and not bool((self._seen == chosen).any()):
            self._seen = torch.cat([self._seen, torch.tensor([chosen])])
        if self._sampling.logprobs is None:
            return Token(chosen)
        logprobs = (scores - best).log_softmax(-1)
        count = min(self._sampling.logprobs, len(logprobs))
        values, ids = logprobs.topk(count)
        pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(chosen, float(logprobs[chosen]), pairs)

    def _adjusted(self, scores: Tensor) -> Tensor:
        """Return the logits after penalties and biases."""
        sampling = self._sampling
        if self._seen is not None:
            seen = scores[self._seen]
            penalty = sampling.repetition_penalty
            scores = scores.index_put((self._seen,), torch.where(seen < 0, seen * penalty, seen / penalty))
        if self._generated and (sampling.presence_penalty or sampling.frequency_penalty):
            ids = torch.tensor(list(self._generated))
            counts = torch.tensor(list(self._generated.values()), dtype=torch.float32)
            scores = scores.index_put(
                (ids,), scores[ids] - sampling.presence_penalty - sampling.frequency_penalty * counts
            )
        if sampling.logit_bias:
            scores = scores.index_put((self._biased,), scores[self._biased] + self._biases)
        return scores

    def _sample(self, scores: Tensor) -> int:
        sampling = self._sampling
        scores = scores / sampling.temperature
        ids = None
        if 0 < sampling.top_k < len(scores):
            scores, ids = scores.topk(sampling.top_k)
        elif sampling.top_p < 1:
            scores, ids = scores.sort(descending=True)
        probabilities = scores.softmax(-1)
        if sampling.top_p < 1:
            # A token is kept if the tokens before it have not yet reached the share.
            inside = probabilities.cumsum(-1) - probabilities < sampling.top_p
            inside[0] = True  # the first one is kept even if the share is zero in fp32
            probabilities = probabilities.where(inside, 0)
        if sampling.min_p > 0:
            probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
        index = int(torch.multinomial(probabilities, 1, generator=self._random))
        return index if ids is None else int(ids[index])
