"""Operations: everything that a client can ask of a model, one operation per file.

Each file defines the body of the request, the body of the reply, and a plan, which says what the
engine has to compute and how the results become the reply. HTTP routes, OpenAPI, metric labels, the
methods of `LLM` and the Python client are derived from the list in `all.py`. `model/inference/`
computes; `service/` queues requests and sends replies.
"""
