"""Decoders of prompts and steps: plain torch, native CPU code, and CUDA graphs."""
