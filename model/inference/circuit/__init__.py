"""Circuit: the parts of a model that carry a logit difference, and the paths between them."""
