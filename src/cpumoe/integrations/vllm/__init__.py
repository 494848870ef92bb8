"""The vLLM plug-in: quantised mixture-of-experts checkpoints on any CPU, served by vLLM."""
