"""Continuous batching on the native decoder: requests, scheduler, paged KV cache, sampler and engine."""
