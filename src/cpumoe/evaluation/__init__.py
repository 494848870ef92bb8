"""Measures how good a model is and which experts it uses, and checks the kernels."""
