"""Routes other than operations: status and facts of the server, and administration."""
