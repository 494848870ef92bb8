"""Predicted tokens per second of a model on N ranks, from measured costs."""
