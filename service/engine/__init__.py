"""The engine behind asyncio: its loop in a thread or a process, admission, and how it is built."""
