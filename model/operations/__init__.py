"""Operations: everything that can be asked of a model, one file each.

Each file has a request body, a reply body, and a plan: the engine requests that answer the body,
and the way from their events to the reply. HTTP routes, OpenAPI, metric labels, the methods of
`LLM` and the Python client are derived from the list in `all.py`. `service/` queues requests and
sends replies; `model/inference/` computes.
"""
