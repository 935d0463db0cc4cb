"""The CUDA decoder, which replays recorded steps, samples on the device, and queues copies without
waiting for them."""
