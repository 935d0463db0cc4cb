"""The application: assembled, started, watched by signals, described in /docs."""
