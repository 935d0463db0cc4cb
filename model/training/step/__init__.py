"""One training step: forward, loss and what compiles them; validation; counted operations."""
