"""The vocabulary of a model trained elsewhere: found, understood, held against its rows."""
