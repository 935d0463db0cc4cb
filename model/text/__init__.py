"""Text to token ids and back, and from messages to a prompt."""
