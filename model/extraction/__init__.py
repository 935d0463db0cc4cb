"""Extraction: logprobs or stages of every token of a text, into files."""
