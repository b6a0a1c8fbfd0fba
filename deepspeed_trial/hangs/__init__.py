"""Where each rank is, which is behind or lost, and the end of a run that no longer moves."""
