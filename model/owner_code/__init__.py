"""Owner's code: models that are computed by the code that they were trained with.

`process/` is the program that runs the code, in a separate process. `connection.py` starts it and
talks to it. `config.py` describes such a model.
"""
