"""Images: found, decoded once a host, cached, augmented, and cut into micro-batches."""
