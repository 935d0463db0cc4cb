"""Comparison of logitd with its peers: decode and prefill on the same weights, in turns.

`python -m benchmarks.peers --help`. Each peer runs in a process of its own (`worker.py`), which is
told what to do by `__main__.py`.
"""
