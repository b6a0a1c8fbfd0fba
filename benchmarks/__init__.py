"""Benchmarks: the trial, bare DeepSpeed and PyTorch loops, Determined's example style, other programs."""
