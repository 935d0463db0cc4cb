"""The fault suite: attacks on real processes, short for CI and long by hand."""
