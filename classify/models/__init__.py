"""Networks, their weights, and a check that a network fits the data."""

import deepspeed_trial  # noqa: F401 - before anything here imports deepspeed: see there
