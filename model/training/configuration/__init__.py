"""Settings of a run, presets of shapes and recipes, and the resolved run."""
