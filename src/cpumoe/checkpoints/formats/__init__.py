"""What lies on disk: one file per family, each a set of functions and values without state."""
