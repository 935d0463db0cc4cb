"""From a configuration to a run that is ready: sized, resolved, created, resumed or joined."""
