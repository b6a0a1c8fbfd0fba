"""Search for hyperparameters on this machine."""
