"""Exceptions of cpumoe. Bad arguments found by the core arrive as ValueError with the same kind of message."""

from __future__ import annotations


def printable(text: object) -> str:
    """Text from a file, fit for a terminal and for one line: what is not printable becomes an escape sequence.

    Names of tensors may hold anything: sequences that a terminal obeys, line breaks, letters that turn the direction of
    writing, halves of surrogate pairs that no encoding takes.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class CpumoeError(Exception):
    """Base of the exceptions that cpumoe defines."""


class _AboutFiles(CpumoeError, ValueError):
    """Its message is one line that can be printed, whatever the files say that it was made from."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class UnsupportedScheme(_AboutFiles):
    """A quantisation scheme that cannot be parsed, is not legal, or does not fit the shapes."""


class NoBackend(CpumoeError, RuntimeError):
    """No backend serves a configuration, or the one asked for does not; the message has the reasons."""


class CheckpointError(_AboutFiles):
    """A checkpoint that cannot be read, is not complete, or holds what is not expected; the message has the names."""


class NotEnoughMemory(CpumoeError, MemoryError):
    """A model needs more memory than is free; nothing of it was loaded. The message has the sizes."""


class RankError(CpumoeError, RuntimeError):
    """A rank has ended, failed, does not answer or runs something else; the message names it."""
