"""What is trained, for others: files of several forms, a folder as Hugging Face has them, their scores."""
