"""Checkpoints on disk: opening, checking, loading and inspecting them."""
