"""The endpoints, a file each: what they take, what they give, and nothing that computes."""
