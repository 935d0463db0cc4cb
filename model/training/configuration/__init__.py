"""What a person can ask of a run: its fields, presets of shapes and recipes, and what follows."""
