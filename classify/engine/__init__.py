"""The DeepSpeed configuration, its checks, and the engine that is built from it."""

import deepspeed_trial  # noqa: F401 - its docstring says why deepspeed must come later
