"""What a run shows: metrics, figures, TensorBoard, and the HTML report."""
