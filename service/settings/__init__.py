"""Settings of the commands: flags, environment variables, .env keys and --help from one model each.

Command line > `LOGITD_*` environment > `.env` > default. Defaults are here or in the trainer's
`TrainingConfig`, and nowhere else. Imports neither torch nor fastapi, so --help is immediate;
`serve.py` imports nothing of the trainer.
"""
