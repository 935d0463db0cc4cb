"""Access: API keys and their limits, accepted hosts, and callers' names."""
