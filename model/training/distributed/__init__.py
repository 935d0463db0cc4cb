"""Several processes that train one model: data parallel, or sharded (FSDP)."""
