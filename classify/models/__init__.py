"""Networks by name, their weights in and out, and whether a network goes with the data."""
