"""The vocabulary of a model trained elsewhere: finding it, reading it, and checking it against the
model's rows."""
