"""Predicts how many servers a load needs, from step times, and compares with real servers."""
