"""How logitd is run where it matters: watched, balanced, on many machines."""
