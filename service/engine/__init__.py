"""The engine for asyncio: its thread, its weights, the admission of requests, and its
construction."""
