"""The engine of a model: which one computes its requests, and the one for models that compute one at a time.

An engine takes :class:`Job` objects and delivers their tokens from a thread of its own. Nothing else may run the model
while an engine has it, because a call changes settings inside a model of transformers.
"""

from __future__ import annotations

import copy
import logging
import operator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from cpumoe.errors import RankError
from cpumoe.generation.memory import CacheSize, cache_size, one_request_size
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.int8_cache import holds_records
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.integrations.transformers.preallocated_cache import RoomyLayer, RoomySlidingLayer
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.job_thread import JobThread
from cpumoe.steps.rank_runner import Balancing, runner_for
from cpumoe.steps.request import ENDING, NOT_COMPUTED, Job

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from cpumoe.generation.batch_engine import BatchEngine
    from cpumoe.parallel.ranks import Ranks

_log = logging.getLogger("cpumoe")

# Settings of a generation_config that change which tokens are chosen and are not part of Sampling, each with the value
# besides None that changes nothing.
_LEFT_OUT = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "suppress_tokens", "top_h"), None),
}

# Layers of caches that transformers continues from where another call has left them.
_CONTINUED = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, RoomyLayer, RoomySlidingLayer)
_STATES = ("conv_states", "recurrent_states")  # of a LinearAttentionLayer
_PROBE_TOKENS, _PROBE_CUT = 12, 7


Engine: TypeAlias = "JobThread | BatchEngine"


class CannotBatch(Exception):
    """transformers cannot batch requests for this model; the message says why."""


# ---- the choice of the engine --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """An engine that computes, up to the end of a ``with`` block.

    Attributes:
        size: of its KV cache; None where a cache grows with each request.
        way: how requests are computed, as the server prints it.
    """

    engine: Engine
    size: CacheSize | None
    way: str

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()


def start_engine(
    model: PreTrainedModel,
    free_bytes: int,
    *,
    memory_gb: float | None = None,
    one_request: bool = False,
    tokens: int | None = None,
    ranks: Ranks | None = None,
    balancing: Balancing | None = None,
) -> Started:
    """Start the best engine that there is for a model that leaves ``free_bytes`` of memory.

    Args:
        memory_gb: of the KV cache; None: what :func:`cache_size` chooses.
        one_request: there is one request at a time. Without a native decoder it goes through the model's own code.
        tokens: with ``one_request``, the most tokens of a request; None: the model's context, or fewer if the memory
            has no room for them.
        ranks: those that the model is spread over, of which this is the first.
    """
    size, obstacle = None, None
    if (native := native_with_head(model)) is not None:
        costs = native.token_bytes, native.state_bytes
        if one_request:
            size = one_request_size(model.config, free_bytes, tokens, *costs)
        else:
            size = cache_size(model.config, model.dtype, free_bytes, memory_gb, *costs)
        runner = runner_for(
            PagedDecoder(model, native), size.blocks, size.block_tokens, size.sequences, ranks, balancing
        )
        steps = StepEngine(runner, size.blocks, size.block_tokens, size.step_tokens, size.sequences)
        obstacle = steps.start()
        if obstacle is None:
            own = {name: getattr(model.generation_config, name, None) for name in _LEFT_OUT}
            if left_out := [name for name, value in own.items() if value not in (None, _LEFT_OUT[name], [], {})]:
                _log.warning("generation_config.json has %s, which the native decoder leaves out", ", ".join(left_out))
            return Started(steps, size, "each step in one call of the core")
        steps.stop()
        if ranks:
            raise steps.lost or RuntimeError(obstacle)
    if one_request:
        if obstacle is not None:
            _log.warning("requests go through transformers, layer by layer: %s", obstacle)
        return Started(SequentialEngine(model), None, "")
    if holds_records(model):
        obstacle = obstacle or "transformers' continuous batching holds keys and values in float"
    else:
        because = "" if obstacle is None else f": {obstacle}"
        try:
            from cpumoe.generation.batch_engine import BatchEngine

            size = _batching_size(model, free_bytes, memory_gb)
            batches = BatchEngine(model, size.blocks, size.block_tokens, size.step_tokens)
            batches.start()
            return Started(batches, size, f"by transformers' continuous batching{because}")
        except (CannotBatch, ImportError) as problem:
            obstacle = str(problem)
    way = f"requests are answered one at a time, since batching fails for this model: {obstacle}"
    return Started(SequentialEngine(model), None, way)


def _batching_size(model: PreTrainedModel, free_bytes: int, memory_gb: float | None) -> CacheSize:
    """Return the KV cache size of transformers' continuous batching. Raise CannotBatch if heads differ by layer."""
    try:
        return cache_size(model.config, model.dtype, free_bytes, memory_gb)
    except RuntimeError as problem:  # a configuration with another number of heads for some layers
        raise CannotBatch(str(problem)) from problem


# ---- one request after another -------------------------------------------------------------------------------------


class SequentialEngine(JobThread):
    """Runs ``model.generate`` for one request after another, for models that nothing else computes.

    The KV cache of the last request is kept: a prompt that begins like it is not computed from its beginning, if the
    model continues caches.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__("cpumoe-generate")
        self._model = model
        self._cache: Cache | None = None
        self._cached: list[int] = []  # the tokens of the cache, and the last one, which is not in it
        self._reads_states: bool | None = None  # see _reads_states; None before it was tried
        self._thread.start()

    def _compute_all(self) -> None:
        while (job := self._added.get()) is not None and not self._stopping:
            if not job.over:
                self._generate(job)
            self._unfinished.discard(job)

    def _generate(self, job: Job) -> None:
        def choose(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = job.next_token(scores[0])
            chosen = torch.full_like(scores, -torch.inf)
            chosen[0, token or 0] = 0
            return chosen

        def is_over(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if self._stopping:
                job.fail(ENDING)
            return torch.full((tokens.shape[0],), job.over)

        tokens = torch.tensor([job.prompt])
        try:
            cache, job.cached_tokens = self._take_cache(job.prompt)
            out: Any = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                max_new_tokens=job.max_new_tokens,
                # The model's own settings are part of the job, and stop strings are looked for in the text.
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                stop_strings=None,
                cache_implementation=None,
                max_time=None,
                logits_processor=LogitsProcessorList([choose]),
                stopping_criteria=[is_over],
                return_dict_in_generate=True,
            )
            self._cache, self._cached = out.past_key_values, out.sequences[0].tolist()
            if type(self._cache) is not DynamicCache or not all(
                type(layer) in _CONTINUED for layer in self._cache.layers
            ):
                self._cache = None
            if not job.over:
                job.fail(f"{NOT_COMPUTED}: transformers ended it early")
        except RankError:  # without the other ranks no later job can be computed either
            raise
        except Exception:  # an error in one job must not end the thread that computes for all others
            _log.exception("a request failed")
            job.fail(NOT_COMPUTED)

    def _take_cache(self, prompt: list[int]) -> tuple[Cache | None, int]:
        """Return the cache, cut to the prefix that it shares with ``prompt``, and the length of that prefix."""
        cache, self._cache = self._cache, None  # an error leaves no wrong cache behind
        if cache is None:
            return None, 0
        length = cache.get_seq_length()
        # The last token is always computed: its logits are needed.
        common = sum(takewhile(bool, map(operator.eq, self._cached[:length], prompt[:-1])))
        if common == 0 or not self._is_continued(cache):
            return None, 0
        if common < length:
            try:
                cache.crop(common - length)
            except RuntimeError:  # of recurrent states and sliding windows: the earlier ones are gone
                return None, 0
        return cache, common

    def _is_continued(self, cache: Cache) -> bool:
        """Return whether the model goes on from a cache that another call has left, with several new tokens."""
        if not any(type(layer) is LinearAttentionLayer for layer in cache.layers):
            return True
        if self._reads_states is None:
            try:
                self._reads_states = _reads_states(self._model)
            except RankError:
                raise
            except Exception:  # its cache is of another kind than it looks like
                self._reads_states = False
            if not self._reads_states:
                _log.info("this model does not go on from recurrent states: prompts are computed from their beginning")
        return self._reads_states


def _reads_states(model: PreTrainedModel) -> bool:
    """Return whether the recurrent layers of a model go on from their states in a call with several tokens.

    Some of transformers do so for one token only, and begin with empty states for more.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))

    def logits(cleared: str) -> torch.Tensor:
        copied = copy.deepcopy(cache)
        for layer in copied.layers:
            for state in _states_of(layer, cleared):
                state.zero_()
        found: torch.Tensor = model(input_ids=ids[:, _PROBE_CUT:], past_key_values=copied, use_cache=True).logits
        return found

    with torch.no_grad():
        cache = model(input_ids=ids[:, :_PROBE_CUT], use_cache=True).past_key_values
        kinds = [kind for kind in _STATES if any(_states_of(layer, kind) for layer in cache.layers)]
        expected = logits("none")
        return not any(torch.equal(logits(kind), expected) for kind in kinds)


def _states_of(layer: Any, kind: str) -> list[torch.Tensor]:
    return [state for state in getattr(layer, kind, {}).values() if state is not None]
