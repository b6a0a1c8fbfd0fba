"""What an image classifier is made of. Each package imports those before it, and ``deepspeed_trial``, alone.

- ``config``: the experiment file and the hyperparameters;
- ``images``: found, decoded once, cached, augmented, cut into micro-batches;
- ``models``: networks by name, their weights in and out, and whether a network goes with the data;
- ``engine``: the DeepSpeed configuration, its checks, and the engine;
- ``reports``: metrics, figures, TensorBoard, the HTML report;
- ``tuning``: a search on this machine.
"""
