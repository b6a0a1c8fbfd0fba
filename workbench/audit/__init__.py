"""The audit of labelled images, and a linear head, on features that are computed once."""
