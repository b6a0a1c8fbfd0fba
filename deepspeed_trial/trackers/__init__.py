"""Where else a run is written down: MLflow, Weights & Biases."""
