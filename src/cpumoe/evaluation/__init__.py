"""How good a model is, which experts it uses, and whether the kernels are right."""
