"""Optimizers, their parameter groups and the learning-rate schedule."""
