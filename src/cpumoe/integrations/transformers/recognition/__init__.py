"""Finding out what a model's layers compute, and checking it."""
