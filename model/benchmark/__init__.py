"""Rates of the engine and the limits of the machine, for `logitd bench`."""
