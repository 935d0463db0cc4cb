"""A GPT with TransformerLens' interface: named hook points, caches of activations, weights."""
