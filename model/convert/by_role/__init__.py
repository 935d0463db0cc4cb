"""Imports models from other programs by finding the role of each tensor (see `README.md`)."""
