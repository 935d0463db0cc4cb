"""Decoders, which run prefill and decode steps, in plain torch, in native CPU code, and as CUDA
graphs."""
