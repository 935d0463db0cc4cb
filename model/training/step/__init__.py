"""The parts of a training step (forward pass, loss, compilation), validation, and operation
counts."""
