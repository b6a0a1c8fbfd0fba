"""Exported networks: files of several forms, a folder for the Hugging Face Hub, scores."""
