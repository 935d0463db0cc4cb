"""Tests of `model/owner_code` and of models that are computed by it."""
