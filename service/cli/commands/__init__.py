"""The commands. Each is a module with `run(settings)`, which returns the exit code. A module is
imported only when its command is called."""
