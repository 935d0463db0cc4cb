"""Training of sparse autoencoders: the activations on a text, the fit, and measurements of the
result."""
