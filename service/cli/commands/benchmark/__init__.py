"""How fast a server answers: its process, a load of streams, and the report of `logitd bench`."""
