"""Owner's code: computes a model's logits with the code that trained the model.

`process/` is the program that runs this code in a separate process. `connection.py` starts the
process and communicates with it, for an import or while the model is served. `config.py` describes
such a model.
"""
