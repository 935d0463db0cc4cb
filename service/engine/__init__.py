"""The engine behind asyncio: its thread, its weights, admission, and how it is built."""
