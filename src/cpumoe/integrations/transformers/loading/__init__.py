"""Loading, packing and saving models of transformers."""
