"""The CUDA decoder: recorded steps, sampling on the device, transfers without waiting."""
