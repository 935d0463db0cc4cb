"""The loss of a checkpoint on a text, and the loss that quantization adds."""
