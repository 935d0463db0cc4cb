"""Operations: everything that can be asked of a model, one file each.

Each file has a request body, a reply body, and a plan: which engine requests answer the body, and
how the reply is made of their events. HTTP routes, OpenAPI, metric labels, the methods of `LLM`
and the Python client are derived from the list in `all.py`. Not here: how requests are queued, how
replies travel (`service/`), and how anything is computed (`model/inference/`).
"""
