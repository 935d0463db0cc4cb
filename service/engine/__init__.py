"""The engine behind asyncio: its thread, versions of its weights, admission, and how it is built."""
