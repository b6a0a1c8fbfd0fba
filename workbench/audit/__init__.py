"""The audit of labelled images, and linear heads; both use features that are computed once."""
