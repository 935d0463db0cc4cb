"""Structured output: limits the next token by a regular expression, a JSON Schema or a grammar."""
