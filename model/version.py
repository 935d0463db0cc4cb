"""The version of logitd, the same in `pyproject.toml`, in replies and in CHANGELOG.md."""

VERSION = "0.1.0"
