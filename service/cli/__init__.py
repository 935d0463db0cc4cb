"""The command line: `logitd` and its commands."""
