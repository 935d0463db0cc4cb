"""A GPT with TransformerLens' interface: named hook points, activation caches, weights."""
