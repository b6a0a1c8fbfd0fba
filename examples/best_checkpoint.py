"""Creates an experiment on a cluster, waits for it, and exports the network of its best checkpoint.

    DET_MASTER=http://localhost:8080 python3 examples/best_checkpoint.py const.yaml  (in this project)

Source: https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/python-sdk/python-sdk.rst
"""

from __future__ import annotations

import subprocess
import sys

from determined.experimental import client


def main(config: str) -> None:
    """Write the network to ``net.pt``, a file of plain PyTorch."""
    experiment = client.create_experiment(config=config, model_dir=".")
    print(f"experiment {experiment.id}")
    if experiment.wait() != client.ExperimentState.COMPLETED:
        sys.exit(f"experiment {experiment.id} did not complete; see: det experiment logs {experiment.id}")
    checkpoints = experiment.list_checkpoints(max_results=1)  # best first, by the searcher's metric
    if not checkpoints:  # Determined also shows an invalid configuration as completed
        sys.exit(f"experiment {experiment.id} trained nothing; see: det experiment logs {experiment.id}")
    checkpoint = checkpoints[0]
    folder = checkpoint.download(f"checkpoints/{checkpoint.uuid}")
    subprocess.run([sys.executable, "checkpoint.py", "export", folder, "net.pt"], check=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "const.yaml")
