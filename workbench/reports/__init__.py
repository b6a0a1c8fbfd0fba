"""The HTML report of finished runs."""
