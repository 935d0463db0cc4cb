"""Extraction: writes logprobs or stages of every token of a text to files."""
