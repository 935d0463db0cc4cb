"""From texts to shards of token ids, batches and validation windows."""
