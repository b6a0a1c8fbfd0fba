"""Images: listing, decoding (once per host), caching, augmentation and micro-batches."""
