"""Application: the ASGI application, its middleware, its startup and shutdown, and its server."""
