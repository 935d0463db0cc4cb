"""Conversion: imports models from other formats, and exports checkpoints to other formats.

`importing.py` and `exporting.py` are the entry points. Serving does not import this package.
"""
