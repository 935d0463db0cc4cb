"""Routes that are not operations: about the server and its models, and for the administrator."""
