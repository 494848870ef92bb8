"""Stop strings: an Aho-Corasick automaton over all of a request's stop strings, and the filter of one answer."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any


def own_stop_strings(model: Any) -> tuple[str, ...]:
    """Return the stop strings of a model's generation_config."""
    stops = getattr(model.generation_config, "stop_strings", None) or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


class StopAutomaton:
    """Finds the first complete stop string in a text that comes in pieces, in linear time.

    It is built once for a request and does not change, so that all answers to the request share it. A state is the
    longest end of the text that is a beginning of a stop string; state 0 is the empty one. Both the construction and
    the search take amortised constant time per character, whatever the stop strings are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # The trie. A stop string that leaves the known ones adds consecutive states, so that most transitions lead to
        # the next number: a few bytes per state, where a dictionary for each would take hundreds.
        self._to_next = [""]  # state -> the character that leads to state + 1, or ""
        self._branches: dict[int, dict[str, int]] = {}  # the other transitions
        self._depth = array("l", [0])  # characters of the state
        self._found = array("l", [0])  # length of the longest stop string that the state ends with; 0 for none
        for stop in stops:
            self._insert(stop)
        self._fallback = array("l", bytes(len(self._depth) * self._depth.itemsize))  # the next shorter state
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for index, character in enumerate(stop):
            following = self._following(state, character)
            if following is None:
                following = len(self._depth)
                if following == state + 1:
                    self._to_next[state] = character
                else:
                    self._branches.setdefault(state, {})[character] = following
                self._to_next.append("")
                self._depth.append(index + 1)
                self._found.append(0)
            state = following
        if state:  # an empty string stops nothing
            self._found[state] = len(stop)

    def _following(self, state: int, character: str) -> int | None:
        if self._to_next[state] == character:
            return state + 1
        branches = self._branches.get(state)
        return None if branches is None else branches.get(character)

    def _link(self) -> None:
        """Set the fallback of every state, in order of depth: it is shorter than the state, so it is known before."""
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            transitions = dict(self._branches.get(state, ()))
            if self._to_next[state]:
                transitions[self._to_next[state]] = state + 1
            for character, child in transitions.items():
                shorter = self._step(self._fallback[state], character) if state else 0
                self._fallback[child] = shorter
                self._found[child] = self._found[child] or self._found[shorter]
                waiting.append(child)

    def _step(self, state: int, character: str) -> int:
        """Return the state after one more character. Each fallback is paid for by a character that made it longer."""
        while (following := self._following(state, character)) is None and state:
            state = self._fallback[state]
        return following or 0

    def search(self, state: int, piece: str) -> tuple[int, int, int]:
        """Continue the search in ``state`` with the next piece of the text.

        Returns the new state, the number of characters of ``piece`` up to the end of the first complete stop string
        (-1 if there is none), and the length of that stop string; of several with the same end, the longest.
        """
        for count, character in enumerate(piece, 1):
            state = self._step(state, character)
            if self._found[state]:
                return state, count, self._found[state]
        return state, -1, 0

    def depth(self, state: int) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        return self._depth[state]


class StopStrings:
    """Passes the text of one answer on until one of the stop strings comes, whatever pieces the text comes in.

    The stop string that is complete first ends the text; neither it nor the text after it is passed on. Text that may
    be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held_back = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that can be shown now; nothing after a stop string was found."""
        if self.found or not piece:
            return ""
        before, text = len(self._held_back), self._held_back + piece
        self._state, end, length = self._automaton.search(self._state, piece)
        if end >= 0:
            self.found, self._held_back = True, ""
            return text[: before + end - length]
        shown = len(text) - self._automaton.depth(self._state)
        self._held_back = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that was held back and did not become a stop string."""
        text, self._held_back, self._state = self._held_back, "", 0
        return text
