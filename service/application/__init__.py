"""Application: the ASGI application, its middleware, its life and its server."""
