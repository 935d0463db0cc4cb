"""Settings: one model per command gives its flags, environment variables, .env keys and --help.

Command line > `LOGITD_*` environment > `.env` > default. Every default of the command line stands
here or in the trainer's `TrainingConfig`, and nowhere else. Imports neither torch nor fastapi, so
that --help is immediate. `serve.py` imports nothing of the trainer, so that a server does not.
"""
