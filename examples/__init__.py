"""Examples: a trial without images, cluster files and a notebook."""
