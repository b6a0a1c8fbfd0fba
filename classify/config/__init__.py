"""The experiment file and the hyperparameters: every key, its default and its rule, once."""
