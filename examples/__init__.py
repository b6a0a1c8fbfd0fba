"""Trials that have nothing to do with images, run by the harness."""
