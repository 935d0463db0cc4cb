"""The run on a GPU: compare its results with the CPU's, then measure serving and training."""
