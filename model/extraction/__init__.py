"""Extraction: writes the logprobs or other values of every token of a text to files."""
