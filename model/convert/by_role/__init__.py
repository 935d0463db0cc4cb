"""Models of any code, recognised by the roles of their tensors (`README.md`)."""
