"""Structured output: generates only text that matches a regular expression, a JSON Schema or a
grammar."""
