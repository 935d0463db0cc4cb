"""Set-up of a run: choosing its size, and creating, resuming or joining it."""
