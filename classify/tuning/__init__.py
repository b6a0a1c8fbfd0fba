"""Search for hyperparameters on this machine, and for the fastest configuration."""
