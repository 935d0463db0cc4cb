"""Models: the served checkpoints, and the requests to them."""
