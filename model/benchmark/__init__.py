"""Measures how fast the engine prefills and decodes, and compares both rates with the machine's
limits, for `logitd bench`."""
