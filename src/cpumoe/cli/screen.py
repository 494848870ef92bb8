"""An answer on the terminal as it is generated, with its reasoning before it."""

from __future__ import annotations

from typing import TextIO


class Screen:
    """Prints the pieces of an answer; its reasoning goes to ``aside``, between two lines that name what follows."""

    def __init__(self, aside: TextIO) -> None:
        self._aside = aside
        self._in_reasoning = False

    def show_reasoning(self, piece: str) -> None:
        if not self._in_reasoning:
            print("[reasoning]", file=self._aside)
            self._in_reasoning = True
        print(piece, end="", file=self._aside, flush=True)

    def show_answer(self, piece: str) -> None:
        if self._in_reasoning:
            print("\n[answer]", file=self._aside, flush=True)
            self._in_reasoning = False
        print(piece, end="", flush=True)
