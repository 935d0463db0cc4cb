"""HTTP: a generic route for all operations, and the forms of their replies."""
