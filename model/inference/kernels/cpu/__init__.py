"""The native decoder: C++ code compiled for this machine's processor."""
