"""The GPU run: compares results on the GPU with the CPU's, then measures serving and training."""
