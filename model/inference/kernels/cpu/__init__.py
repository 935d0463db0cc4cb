"""The native decoder: C++ compiled for the processor at hand."""
