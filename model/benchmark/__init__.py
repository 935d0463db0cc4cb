"""The rates of the engine and the limits that the machine sets to them, for `logitd bench`."""
