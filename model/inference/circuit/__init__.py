"""Circuits: the parts of a model that account for a logit difference, and the paths between
them."""
