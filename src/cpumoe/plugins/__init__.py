"""Where users already are: transformers."""
