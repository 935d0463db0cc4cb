"""HTTP: one generic route for all operations, and the forms of its replies."""
