"""Measures the speed of layers and models, and what the machine could do at best."""
