"""Checkpoints of a run: written atomically, checked before use, and loaded without running code."""
