"""Trials without images, run by `deepspeed_trial`."""
