"""The commands, a module each with `run(settings) -> exit code`; imported when they are called."""
