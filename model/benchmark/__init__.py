"""Measures the rates of the engine and compares them with the machine's limits, for `logitd
bench`."""
