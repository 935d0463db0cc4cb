"""Access: API keys, their limits, accepted hosts, and the names of callers."""
