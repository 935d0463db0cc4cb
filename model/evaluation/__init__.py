"""What a checkpoint's loss is on a text, and what quantization adds to it."""
