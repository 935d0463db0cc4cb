"""Tests of `model/owner_code` and of models that run their owner's code."""
