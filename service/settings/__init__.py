"""Settings of the commands: one pydantic class per command defines its flags, environment
variables, .env keys and --help.

A value on the command line takes precedence over a `LOGITD_*` variable in the environment, then
over `.env`, then over the default. Defaults are only here and in the trainer's `TrainingConfig`.
This package imports neither torch nor fastapi, so --help is immediate; `serve.py` imports nothing
from the trainer.
"""
