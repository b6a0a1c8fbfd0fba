"""Exported networks: their formats, the folder for the Hugging Face Hub, predictions and metrics."""
