"""How fast the trial is, beside a bare engine, bare PyTorch and Determined's example style."""
