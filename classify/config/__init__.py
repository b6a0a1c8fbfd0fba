"""The experiment file and its keys: each key once, with its default, rule and documentation."""
