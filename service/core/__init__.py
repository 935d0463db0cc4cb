"""What every part of the service shares: errors, API keys, metrics, state."""
