"""A search for hyperparameters on this machine."""
