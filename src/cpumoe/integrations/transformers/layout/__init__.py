"""What a model of transformers consists of, and where its files have it."""
