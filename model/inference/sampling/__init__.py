"""Sampling: turns a row of logits into a token."""
