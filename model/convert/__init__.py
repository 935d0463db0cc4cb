"""Models trained elsewhere: from other people's formats to a checkpoint, and back.

`importing.py` and `exporting.py` are the doors. Serving imports nothing of this package.
"""
