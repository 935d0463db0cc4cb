"""The trainer: from text to a checkpoint, in one run directory.

Start reading at `trainer.py`. Importing `model.training` itself imports nothing.
"""
