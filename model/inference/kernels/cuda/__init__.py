"""The CUDA decoder: recorded steps, sampling on the device, transfers that nobody waits for."""
