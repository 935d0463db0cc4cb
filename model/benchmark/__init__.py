"""How fast a model runs here, and how fast it could: `logitd bench`, less everything with HTTP."""
