"""The trainer: trains a GPT on a text and writes checkpoints, all in one run directory.

Start reading at `trainer.py`.
"""
