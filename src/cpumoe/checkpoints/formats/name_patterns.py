"""Patterns of module names in a ``quantization_config``: names, and regular expressions that begin with ``re:``.

The expressions come from files, and a short one can take longer than anyone waits. They mean what Python's ``re`` takes
them to mean; the matching is done by the ``regex`` package, which can be given a time limit. (A linear-time engine such
as RE2 would need no limit, but has no look-ahead, which llm-compressor's recipes use.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import regex

from cpumoe.errors import CheckpointError

_LONGEST = 1000  # characters of an expression
_LARGEST_COUNT = 10_000  # repetitions by number; regex writes nested ones out when it compiles, so they multiply
_SECONDS_PER_NAME = 1.0  # of processor time; a usual match takes less than a millionth of that
_SECONDS = 20.0  # for all names of a model together

_COUNTED = re.compile(r"\{(\d*),?(\d*)\}")
# Means something in regex that it does not mean in re: fuzzy matching, and the classes of POSIX.
_OF_REGEX_ALONE = re.compile(r"(?<!\\)\{(?!\d*,?\d*\})|\[:\^?\w+:\]")
_REPETITION = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_LONG_NAME = 500


@dataclass
class TimeBudget:
    """Processor time that the patterns of one configuration have taken, all of them together."""

    spent: float = 0.0


class NamePatterns:
    """Some patterns, compiled once; what was asked before is remembered."""

    def __init__(self, patterns: Sequence[str], budget: TimeBudget | None = None) -> None:
        self._budget = budget or TimeBudget()
        self._names = frozenset(p for p in patterns if not p.startswith("re:"))
        self._expressions = [_Expression(p) for p in patterns if p.startswith("re:")]
        self._known: dict[str, bool] = {}

    def match(self, name: str) -> bool:
        """Whether one of the patterns is the name, or matches its beginning."""
        if name in self._names:
            return True
        if not self._expressions:
            return False
        known = self._known.get(name)
        if known is None:
            start = time.thread_time()
            known = self._known[name] = any(expression.match(name) for expression in self._expressions)
            self._budget.spent += time.thread_time() - start
            if self._budget.spent > _SECONDS:
                slowest = max(self._expressions, key=lambda expression: expression.seconds(name))
                raise slowest.refusal(f"it takes too long (over {_SECONDS:g} s for the names of this model)")
        return known


class _Expression:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        text = pattern[3:]
        if len(text) > _LONGEST:
            raise self.refusal(f"it has {len(text)} characters; up to {_LONGEST} are accepted")
        if prod(max(int(n or 1) for n in counts) or 1 for counts in _COUNTED.findall(text)) > _LARGEST_COUNT:
            raise self.refusal(f"its counted repetitions multiply to more than {_LARGEST_COUNT}")
        if found := _OF_REGEX_ALONE.search(text):
            raise self.refusal(f"{found[0]!r} is not served (a brace that is meant as such is written \\{{)")
        try:
            re.compile(text)
            self._compiled = regex.compile(text)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError) as problem:
            raise self.refusal(str(problem)) from None
        # Two repetitions that are not inside one another take quadratic time at most. The clock costs more than that.
        self._needs_clock = len(_REPETITION.findall(text)) > 2 or _REPEATED_GROUP.search(text) is not None

    def match(self, name: str) -> bool:
        if not self._needs_clock and len(name) < _LONG_NAME:
            return self._compiled.match(name) is not None
        try:
            return self._compiled.match(name, timeout=_SECONDS_PER_NAME) is not None
        except TimeoutError:
            raise self.refusal(f"it takes too long (over {_SECONDS_PER_NAME:g} s for {name:.100})") from None

    def seconds(self, name: str) -> float:
        start = time.thread_time()
        self.match(name)
        return time.thread_time() - start

    def refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"quantization_config has the pattern {self.pattern[:200]!r}: {reason}; write a simpler one, or the names"
        )
