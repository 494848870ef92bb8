"""Fused operators in the place of a model's parts, for models without a native decoder."""
