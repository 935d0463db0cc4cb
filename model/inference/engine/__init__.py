"""Continuous batching: many sequences on one model, one step at a time.

`Engine.step` admits, prefills, decodes and samples. The engine knows nothing of HTTP, text, asyncio
or threads. Only `runner.py` and the modules it uses import torch.
"""
