"""Application: the ASGI application, its middleware, startup and shutdown, and its server."""
