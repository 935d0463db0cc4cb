"""The way in: a body is parsed, resolved to engine requests, and submitted."""
