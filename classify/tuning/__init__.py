"""Search for the fastest micro-batch and the fastest configuration by benchmarks."""
