"""Generates text: sampling, engines that run a model for many requests, and the OpenAI-compatible server."""
