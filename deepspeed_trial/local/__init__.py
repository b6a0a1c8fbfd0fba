"""Runs without a cluster: folder, progress, signals, and the local test mode of ``det``."""
