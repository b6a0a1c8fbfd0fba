"""The audit of labelled images, and a linear head, from features that are computed once."""
