"""A run without a cluster: its folder, its progress, its signals, and the local test mode of ``det``."""
