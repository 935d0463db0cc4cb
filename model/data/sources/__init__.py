"""Where documents come from: files, records, downloads, Python's own text."""
