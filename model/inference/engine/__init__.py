"""Continuous batching: many sequences, one model, one step at a time.

`Engine.step` admits, prefills, decodes and samples; everything else is in the files by name. The
engine knows no HTTP, no text, no asyncio and no threads; of its files only `runner.py` and
`sampler.py` import torch.
"""
