"""The run on a GPU: what it computes, held against the CPU, and how fast it serves and trains."""
