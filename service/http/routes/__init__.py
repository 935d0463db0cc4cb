"""Routes that are no operations: the server, its models, its administrator."""
