"""The GPT: its shape, one forward pass for training and serving, and the memory of its weights."""
