"""Where each schedule keeps its peak; the others scale the optimizer's learning rate and so have none."""

PEAK_KEYS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
}
