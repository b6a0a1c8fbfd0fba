"""What a run shows: metrics, figures, TensorBoard, and the HTML report."""

import deepspeed_trial  # noqa: F401 - before anything here imports deepspeed: see there
