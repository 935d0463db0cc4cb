"""Import of models from arbitrary code: finds the role of each tensor (see `README.md`)."""
