"""Training of sparse autoencoders: activations of a text, the fit, and the resulting figures."""
