"""Exceptions of cpumoe. Bad arguments found by the core arrive as ValueError with the same kind of message."""

from __future__ import annotations


class CpumoeError(Exception):
    """Base of the exceptions that cpumoe defines."""


class UnsupportedScheme(CpumoeError, ValueError):
    """A quantisation scheme that cannot be parsed, is not legal, or does not fit the shapes."""


class NoBackend(CpumoeError, RuntimeError):
    """No backend serves a configuration, or the one asked for does not; the message has the reasons."""


class CheckpointError(CpumoeError, ValueError):
    """A checkpoint that cannot be read, is not complete, or holds what is not expected; the message has the names."""
