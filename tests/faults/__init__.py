"""Fault suite: hostile clients against real servers."""
