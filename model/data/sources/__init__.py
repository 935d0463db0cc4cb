"""Sources of documents: files, records, downloads, Python's own text."""
