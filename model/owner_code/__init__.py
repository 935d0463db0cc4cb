"""Owner's code: models that are computed by the code with which they were trained.

`process/` is the program that runs the code in a separate process. `connection.py` starts the
process and communicates with it. `job.py` runs it once for an import. `config.py` describes such a
model.
"""
