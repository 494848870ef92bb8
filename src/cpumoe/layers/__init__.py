"""Layers of mixture-of-experts models: values that describe them, modules that compute them, who serves them."""
