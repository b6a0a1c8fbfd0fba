"""The fastest micro-batch, and the fastest configuration, by trying."""
