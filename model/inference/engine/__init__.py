"""Continuous batching: many sequences on one model, one step at a time.

`Engine.step` admits, prefills, decodes and samples. The engine knows no HTTP, no text, no asyncio
and no threads. Only `runner.py` and the modules it uses import torch.
"""
