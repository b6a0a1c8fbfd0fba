"""Creates an experiment on a cluster, waits for it, and downloads its best checkpoint.

    DET_MASTER=https://master:8080 python3 examples/best_checkpoint.py const.yaml

Source: https://docs.determined.ai/latest/reference/python-sdk.html
"""

from __future__ import annotations

import sys

from determined.experimental import client


def main(config: str) -> None:
    """Prints where the best checkpoint of the experiment came to lie."""
    experiment = client.create_experiment(config=config, model_dir=".")
    print(f"experiment {experiment.id}")
    if experiment.wait() != client.ExperimentState.COMPLETED:
        sys.exit(f"experiment {experiment.id} did not complete; see: det experiment logs {experiment.id}")
    checkpoint = experiment.list_checkpoints(max_results=1)[0]  # best first, by the searcher's metric
    print(checkpoint.download(f"checkpoints/{checkpoint.uuid}"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "const.yaml")
