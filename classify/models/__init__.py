"""Networks, their weights, and a check that a network fits the data."""

import deepspeed_trial  # noqa: F401 - its docstring says why it must precede deepspeed
