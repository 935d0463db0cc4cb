"""The engine for use from asyncio: its thread, its weights, the admission of requests, and how it
is built."""
