"""Quantising checkpoints, disk to disk."""
