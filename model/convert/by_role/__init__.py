"""Import of models from arbitrary code, recognised by the roles of their tensors (`README.md`)."""
