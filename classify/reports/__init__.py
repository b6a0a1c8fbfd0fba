"""Reports of a run: metrics, figures, TensorBoard, the HTML page."""

import deepspeed_trial  # noqa: F401 - first: it must come before deepspeed
