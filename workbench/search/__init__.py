"""Search for hyperparameters, on this machine or on a Ray cluster."""
