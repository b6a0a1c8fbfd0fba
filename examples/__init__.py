"""Trials that have nothing to do with images, run by `deepspeed_trial`."""
