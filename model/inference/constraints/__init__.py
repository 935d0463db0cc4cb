"""Structured output: which tokens may come next, by regular expression, JSON Schema or grammar."""
