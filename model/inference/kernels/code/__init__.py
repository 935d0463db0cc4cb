"""Decoder for models that are computed by their owner's code."""
