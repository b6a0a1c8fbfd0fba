"""Reports of a run: metrics, figures, TensorBoard, the HTML page."""

import deepspeed_trial  # noqa: F401 - its docstring says why deepspeed must come later
