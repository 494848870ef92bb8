"""Scheduler: chooses the rows of each step (continuous batching, chunked prefill) and keeps the page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cpumoe.steps.page_pool import PagePool, page_name
from cpumoe.steps.request import Job

MOST_SEQUENCES = 256  # computed at the same time; further ones wait


class Sequence:
    """The tokens of a request: its prompt and what has been generated.

    Attributes:
        computed: number of tokens whose KV entries are in ``pages``; the others are still to be computed.
        line: batch slot, the row of the page table that has the pages; None while the sequence waits without pages.
        reached: maximum of ``computed`` so far; after a preemption the sequence finds its own pages again.
    """

    def __init__(self, job: Job, page_tokens: int, shares_pages: bool) -> None:
        self.job = job
        self.tokens = list(job.prompt)
        self.computed = 0
        self.reached = 0
        self.pages: list[int] = []
        self.line: int | None = None
        self._page_tokens = page_tokens
        self._shares_pages = shares_pages
        self._names: list[bytes] = []

    @property
    def pending(self) -> int:
        """Number of tokens to compute; one for a sequence that is decoding."""
        return len(self.tokens) - self.computed

    @property
    def shareable_pages(self) -> int:
        """Number of pages that may be cached ones. The last token is always computed: its logits are needed."""
        return (len(self.tokens) - 1) // self._page_tokens if self._shares_pages else 0

    def page_name(self, index: int) -> bytes:
        """Return the prefix hash of a page whose tokens are all known."""
        size = self._page_tokens
        while len(self._names) <= index:
            first = len(self._names) * size
            self._names.append(page_name(self._names[-1] if first else b"", self.tokens[first : first + size]))
        return self._names[index]

    def page_names(self, count: int) -> list[bytes]:
        """Return the prefix hashes of the pages of the first ``count`` tokens; the last page may not be full."""
        names = [self.page_name(index) for index in range(count // self._page_tokens)]
        if rest := count % self._page_tokens:
            names.append(page_name(names[-1] if names else b"", self.tokens[count - rest : count]))
        return names


@dataclass
class Piece:
    """A chunk: the next ``count`` tokens of a sequence to compute."""

    sequence: Sequence
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the logits of its last token choose the sequence's next token."""
        return self.count == self.sequence.pending


class Schedule:
    """Sequences in order of arrival. Those with pages are always the oldest ones.

    Every step has one row for each sequence that is decoding; the rest of its rows are chunks of prompts, oldest first.
    When pages run out, the youngest sequence with pages is preempted: it releases them and waits. With prefix caching
    its pages stay in the cache, so most of them are found again unless they were evicted.

    Without prefix caching, for models with recurrent states, a sequence that begins with all computed tokens of one
    that has ended, such as the next turn of a chat, takes over its slot, with the states in it, and its pages.

    Args:
        pages: number of pages of the KV cache, each for ``page_tokens`` tokens.
        step_rows: maximum number of tokens of a step.
        sequences: maximum number of sequences with pages at the same time.
        shares_pages: prefix caching: sequences with a common prefix share the pages of that prefix. False for models
            with recurrent states, which are known behind the last computed token only.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        step_rows: int,
        sequences: int = MOST_SEQUENCES,
        *,
        shares_pages: bool = True,
    ) -> None:
        self.pool = PagePool(pages, evicts_first=sequences == 1)  # one at a time: memory for one
        self.page_tokens = page_tokens
        self.tokens = pages * page_tokens  # capacity
        self.sequences: list[Sequence] = []
        self.table = torch.zeros((sequences, pages), dtype=torch.int32)  # page table, a row for each slot
        self._lines = list(range(sequences))  # free slots, least recently used first
        self._left: dict[int, list[int]] = {}  # the tokens that the last sequence of a free slot had computed
        self._step_rows = step_rows
        self._shares_pages = shares_pages

    def add(self, job: Job) -> None:
        """Add a request. All of its tokens must fit into the pages."""
        self.sequences.append(Sequence(job, self.page_tokens, self._shares_pages))

    def drop_ended(self) -> list[Job]:
        """Drop the sequences of finished requests, release their pages, and return these requests."""
        ended = [sequence for sequence in self.sequences if sequence.job.over]
        if ended:
            self.sequences = [sequence for sequence in self.sequences if not sequence.job.over]
        for sequence in ended:
            self._give_back(sequence)
        return [sequence.job for sequence in ended]

    def known_pages(self, job: Job) -> int:
        """Return the number of cached prefix pages of a request's prompt."""
        return len(self._found(Sequence(job, self.page_tokens, self._shares_pages))[0])

    @property
    def goes_on(self) -> bool:
        """Whether a sequence with pages is decoding."""
        return any(sequence.pending == 1 and sequence.line is not None for sequence in self.sequences)

    def next_step(self, prompt_rows: int, *, others_go_on: bool = False) -> list[Piece]:
        """Return the chunks of the next step, ordered by slot; empty only if there are no sequences.

        While sequences are decoding, at most ``prompt_rows`` rows are of prompts. ``others_go_on``: sequences of
        another group are decoding, and wait for this step too.
        """
        counts: dict[Sequence, int] = {}
        rows = self._step_rows
        for sequence in self.sequences:
            if sequence.pending == 1 and rows and sequence.line is not None and self._get_pages(sequence, 1, counts):
                counts[sequence] = 1
                rows -= 1
        if counts or others_go_on:
            rows = min(rows, prompt_rows)
        coming: set[bytes] = set()  # prefix hashes of pages that older sequences compute in this step
        for sequence in self.sequences:
            if rows == 0:
                break
            if sequence in counts:
                continue
            if sequence.line is None and not self._start(sequence):
                break  # those after it arrived later
            self._share_pages(sequence)
            index = sequence.computed // self.page_tokens
            if index < sequence.shareable_pages and sequence.page_name(index) in coming:
                continue
            count = min(rows, sequence.pending)
            if self._get_pages(sequence, count, counts):
                counts[sequence] = count
                rows -= count
                coming.update(sequence.page_name(i) for i in range(index, sequence.shareable_pages))
        return [Piece(*item) for item in sorted(counts.items(), key=lambda item: item[0].line or 0)]

    def advance(self, pieces: list[Piece]) -> None:
        """Record that the chunks have been computed, and add full pages to the prefix cache."""
        for piece in pieces:
            sequence = piece.sequence
            first = sequence.computed // self.page_tokens
            sequence.computed += piece.count
            sequence.reached = max(sequence.reached, sequence.computed)
            for index in range(first, sequence.computed // self.page_tokens):
                self.pool.give_name(sequence.pages[index], sequence.page_name(index))

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _start(self, sequence: Sequence) -> bool:
        """Admit a sequence if its tokens fit, and those of all running sequences with one more page each.

        Otherwise it would soon be preempted.
        """
        if not self._lines:
            return False
        found, line = self._found(sequence)
        free = sum(not self.pool.is_held(page) for page in found)
        needed = self._page_count(len(sequence.tokens)) - len(found)
        for other in self.sequences:
            if other.line is not None:
                needed += self._page_count(len(other.tokens)) + 1 - len(other.pages)
        if needed > self.pool.available - free:
            return False
        sequence.line = self._lines[0] if line is None else line
        self._lines.remove(sequence.line)
        left = self._left.pop(sequence.line, [])
        if line is not None:
            for page in found:
                self._append(sequence, page, is_cached=True)
            if len(left) % self.page_tokens:
                self.pool.forget_name(found[-1])
            self._count_cached(sequence, len(left))
        return True

    def _found(self, sequence: Sequence) -> tuple[list[int], int | None]:
        """Return the cached pages of a sequence's prefix, and the slot whose last sequence it continues, if any."""
        found: list[int] = []
        while len(found) < sequence.shareable_pages:
            page = self.pool.find(sequence.page_name(len(found)))
            if page is None:
                break
            found.append(page)
        line, most = None, len(found) * self.page_tokens
        for free, left in self._left.items():
            if not most < len(left) < len(sequence.tokens) or sequence.tokens[len(left) - 1] != left[-1]:
                continue
            if sequence.tokens[: len(left)] == left:
                pages = [page for name in sequence.page_names(len(left)) if (page := self.pool.find(name)) is not None]
                if len(pages) == self._page_count(len(left)):
                    found, line, most = pages, free, len(left)
        return found, line

    def _share_pages(self, sequence: Sequence) -> None:
        """Acquire cached pages of the tokens that come next."""
        while sequence.computed == len(sequence.pages) * self.page_tokens:
            index = len(sequence.pages)
            page = self.pool.find(sequence.page_name(index)) if index < sequence.shareable_pages else None
            if page is None:
                break
            self._append(sequence, page, is_cached=True)
            self._count_cached(sequence, self.page_tokens)

    @staticmethod
    def _count_cached(sequence: Sequence, tokens: int) -> None:
        """Count the next tokens as computed, since their pages were in the cache."""
        sequence.computed += tokens
        sequence.job.cached_tokens += max(0, sequence.computed - sequence.reached)
        sequence.reached = max(sequence.reached, sequence.computed)

    def _get_pages(self, sequence: Sequence, count: int, counts: dict[Sequence, int]) -> bool:
        """Allocate pages for the next ``count`` tokens; preempt the youngest sequences if no page is free.

        Preempted sequences are removed from ``counts``. Return False if the sequence itself was preempted.
        """
        needed = self._page_count(sequence.computed + count) - len(sequence.pages)
        while self.pool.available < needed:
            youngest = next(other for other in reversed(self.sequences) if other.line is not None)
            self._give_back(youngest)
            counts.pop(youngest, None)
            if youngest is sequence:
                return False
        for _ in range(needed):
            self._append(sequence, self.pool.take())
        return True

    def _append(self, sequence: Sequence, page: int, *, is_cached: bool = False) -> None:
        if is_cached:
            self.pool.hold(page)
        self.table[sequence.line, len(sequence.pages)] = page
        sequence.pages.append(page)

    def _give_back(self, sequence: Sequence) -> None:
        """Release the pages and the slot of a sequence; its tokens will be computed again (recompute)."""
        if sequence.line is None:
            return
        if sequence.computed and not self._shares_pages:
            name = sequence.page_names(sequence.computed)[-1]
            self.pool.give_name(sequence.pages[self._page_count(sequence.computed) - 1], name)
            self._left[sequence.line] = sequence.tokens[: sequence.computed]
        for page in reversed(sequence.pages):
            self.pool.give_back(page)
        self._lines.append(sequence.line)
        sequence.pages, sequence.computed, sequence.line = [], 0, None
