"""Networks by name, their weights in and out, and whether a network goes with the data."""

import deepspeed_trial  # noqa: F401 - before anything here imports deepspeed: see there
