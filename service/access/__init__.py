"""Access: API keys, their limits, and the names of callers."""
