"""Runs without a cluster: folder, metrics, progress, launchers, and the local test mode of ``det``."""
