"""Schedules with a parameter for their peak; all other schedules scale the optimizer's learning rate."""

PEAK_KEYS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
}
