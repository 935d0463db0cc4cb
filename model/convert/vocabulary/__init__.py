"""Finds and reads the vocabulary of a model that was trained elsewhere, and checks that the
vocabulary fits the rows of the model's embedding."""
