#!/bin/bash
# Two nodes of two GPUs each. Two minutes before the time limit the job saves a checkpoint and requeues itself;
# the resumed run is bit-identical.
#   sbatch examples/slurm.sh
#SBATCH --job-name=cifar10
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

requeue() {
    scancel --signal=USR1 "$SLURM_JOB_ID.0" # every task saves a checkpoint and exits
    wait "$training"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1

source .venv/bin/activate
srun python3 train.py --config distributed.yaml --output "runs/slurm-$SLURM_JOB_ID" --resume auto &
training=$!
wait "$training"
