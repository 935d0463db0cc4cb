"""Serving a model: loading, the engine, its kernels, sampling and constraints."""
