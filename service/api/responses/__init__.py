"""The way out: engine events become JSON, server-sent events or arrays."""
