"""HTTP: a generic route for all operations, and the formats of their replies."""
