"""Records of a run in MLflow and Weights & Biases."""
