"""The native decoder: C++ that is compiled for the processor at hand."""
