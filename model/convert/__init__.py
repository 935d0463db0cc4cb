"""Conversion of models: imports checkpoints of other formats, and exports checkpoints to them.

`importing.py` and `exporting.py` are the entry points. Serving imports nothing of this package.
"""
