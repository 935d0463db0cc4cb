"""The checkpoint: a directory with weights, vocabulary and training record, saved atomically and
verified."""
