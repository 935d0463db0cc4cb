"""Decoding in plain torch, one operation at a time: the twin of the faster decoders."""
