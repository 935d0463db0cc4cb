"""Training with several processes: data parallel, or sharded (FSDP)."""
