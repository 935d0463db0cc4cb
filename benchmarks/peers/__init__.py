"""Comparison of logitd with its peers: decode and prefill on the same weights, measured
alternately.

`python -m benchmarks.peers --help` shows the flags. Each peer runs in a separate process
(`worker.py`), to which `__main__.py` sends commands.
"""
