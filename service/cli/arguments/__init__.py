"""What stands around a command's settings: its name as it was called, help, and mistakes."""
