"""Service: the HTTP service, the command line and the Python client.

Only this package imports fastapi, uvicorn and asyncio; it does not import torch. Importing
`service` itself imports nothing.
"""
