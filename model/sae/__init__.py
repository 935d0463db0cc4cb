"""Sparse autoencoders: the features of a stage, in SAELens' format."""
