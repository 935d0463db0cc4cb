"""Import of models from arbitrary code, recognized by the roles of their tensors (`README.md`)."""
