"""Answers prompts piece by piece, for ``cpumoe generate`` and ``cpumoe chat``."""

from __future__ import annotations

import queue
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cpumoe.free_memory import available_bytes
from cpumoe.generation.answer_marks import AnswerMarks
from cpumoe.generation.choice import Choice
from cpumoe.generation.engine import SequentialEngine, start_engine
from cpumoe.generation.stop_strings import StopAutomaton, own_stop_strings
from cpumoe.generation.text import Delta, PlainMessage
from cpumoe.steps.request import Failure, Finish, Job
from cpumoe.steps.sampling import Sampling, Token
from cpumoe_command import interrupts_raised

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cpumoe.parallel.ranks import Ranks


@dataclass
class Answer:
    """The answer to a prompt. ``prefilled`` counts the tokens of the prompt that were not in the cache already.

    If the answer was read as that of a chat, ``reasoning`` is apart from ``text``.
    """

    prompt_tokens: int
    prefilled: int = 0
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
    """One conversation with a model: requests to an engine, one at a time. Use it in a ``with`` block.

    The engine keeps the KV cache, so that the same beginning of a prompt is not computed again.

    Args:
        sampling: with a seed, answer number n has seed + n.
        stops: strings that end an answer, besides those of the model.
        tokens: the most tokens of a prompt and its answer; None: see :func:`start_engine`.
        free_bytes: memory that the model leaves; None: what is available now.
        ranks: those that the model is spread over.

    Attributes:
        token_limit: the most tokens of a prompt and its answer that there is room for; None: no limit is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        stops: Sequence[str] = (),
        *,
        tokens: int | None = None,
        free_bytes: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stops = StopAutomaton((*stops, *own_stop_strings(model)))
        self._marks = AnswerMarks(model, tokenizer)
        self._ranks = ranks
        free = available_bytes() if free_bytes is None else free_bytes
        self._engine = start_engine(model, free, one_request=True, tokens=tokens, ranks=ranks).engine
        self.token_limit = self._engine.token_limit

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        while not self._engine.stop():  # a step that is being computed cannot be interrupted
            pass

    def _stop_finder(self, new_choice: Callable[[], Choice]) -> Callable[[Token], bool] | None:
        """Return what finds stop strings on the engine's thread: ranks without a leader must end at the same token."""
        if not self._ranks or not isinstance(self._engine, SequentialEngine):
            return None
        choice = new_choice()

        def is_last(token: Token) -> bool:
            choice.add(token)
            return choice.finish is not None

        return is_last

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        on_text: Callable[[str], None],
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer ``prompt``, giving each piece of text to ``on_text``. Ctrl-C ends the answer, not the session.

        With ``on_reasoning`` the prompt is a rendered chat; reasoning goes there and is not part of the text. Raise
        RuntimeError if the engine fails.
        """

        def new_choice() -> Choice:
            message = PlainMessage() if on_reasoning is None else self._marks.message(prompt)
            return Choice(0, self._tokenizer, self._stops, message, self._marks.ends)

        choice = new_choice()
        items: queue.SimpleQueue[tuple[float, Token | Finish | Failure]] = queue.SimpleQueue()

        def deliver(item: Token | Finish | Failure) -> None:
            items.put((time.perf_counter(), item))

        job = Job(prompt, max_new_tokens, self._marks.ends, self._sampling, deliver, self._stop_finder(new_choice))
        if (seed := self._sampling.seed) is not None:
            self._sampling = replace(self._sampling, seed=(seed + 1) % 2**64)
        answer = Answer(len(prompt))

        def show(delta: Delta) -> None:
            if delta.reasoning and on_reasoning is not None:
                on_reasoning(delta.reasoning)
            if delta.content:
                on_text(delta.content)

        finish: Finish | Literal["interrupt"] = "interrupt"
        start = time.perf_counter()
        with suppress(KeyboardInterrupt), interrupts_raised() as interrupts:
            self._engine.add(job)
            while choice.finish is None and not interrupts.seen:
                delivered, item = items.get()
                if isinstance(item, Failure):
                    raise self._engine.lost or RuntimeError(item.sentence)
                if not isinstance(item, Token):
                    finish = item
                    break
                answer.decode_seconds = delivered - start - answer.prefill_seconds
                if not answer.tokens:
                    answer.prefill_seconds, answer.decode_seconds = answer.decode_seconds, 0.0
                answer.tokens.append(item.id)
                show(choice.add(item))
        self._engine.cancel(job)
        answer.prefilled = len(prompt) - job.cached_tokens
        show(choice.end("stop" if finish == "stop" else "length"))
        answer.text, answer.reasoning = choice.content, choice.reasoning
        answer.finish = "stop" if choice.finish == "stop" else finish
        return answer
