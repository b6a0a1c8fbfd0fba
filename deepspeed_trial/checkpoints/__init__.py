"""Checkpoints of a run: complete or absent, checked before use, and loaded without running code."""
