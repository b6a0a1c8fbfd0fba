"""Compare the trial's speed with a bare engine's, bare PyTorch's and Determined's example style."""
