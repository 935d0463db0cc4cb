"""The rates of the engine, and the machine's limits on them, for `logitd bench`."""
