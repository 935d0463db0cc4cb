"""Decoding in stock torch, one operation after the other: the twin of the faster decoders."""
