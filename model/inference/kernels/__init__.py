"""Decoders, which compute prompts and decode steps: plain torch, native CPU code, and CUDA
graphs."""
