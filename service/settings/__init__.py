"""Settings of the commands: one model per command defines flags, environment variables, .env keys
and --help.

Command line > `LOGITD_*` environment > `.env` > default. Defaults are only here and in the
trainer's `TrainingConfig`. This package imports neither torch nor fastapi, so --help is immediate;
`serve.py` imports nothing from the trainer.
"""
