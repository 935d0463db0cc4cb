"""Bodies of requests and replies, as pydantic models."""
