"""Models: the checkpoints that a server serves, and the requests to them."""
