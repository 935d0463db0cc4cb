"""Text: where training documents come from, and which of their parts validate.

`opening.py` reads what `--data` names; start there. Nothing here tokenises
(`model/training/prepare.py`). Importing `model.training.text` itself imports nothing.
"""
