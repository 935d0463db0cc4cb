"""Decoder of models that their owner's code computes."""
