"""An image classifier. A package here imports ``deepspeed_trial`` and the packages above it in this list.

- ``config``: the experiment file and the hyperparameters;
- ``images``: image sets, their sources, order, augmentation and loaders;
- ``models``: networks by name, and their weights;
- ``engine``: the DeepSpeed configuration, its checks, and the engine;
- ``reports``: metrics, TensorBoard, the first lines, ``summary.json``;
- ``tuning``: the fastest micro-batch and configuration.
"""
