"""Decoding in plain torch, one operation at a time: the reference for the faster decoders."""
