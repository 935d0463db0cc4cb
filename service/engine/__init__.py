"""The engine for use with asyncio: its thread, its weights, the admission of requests, and its
construction."""
