"""Training data: turns texts into shards of token ids, batches and validation windows."""
