"""The DeepSpeed configuration, its checks, and the engine that is built from it."""
