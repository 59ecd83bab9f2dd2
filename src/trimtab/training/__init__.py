"""Training: one loop, then a file for each kind of run."""
