#!/bin/bash
# Tried on a one-node Slurm 22.05 without GPUs (whole runs of two tasks on CPUs, an error, a signal); not run: GPUs, several nodes.
#
# One task for each GPU. JAX finds the tasks (--distributed auto), and each takes the GPU with its local number.
# Command: sbatch experiments/cluster/slurm_task_per_gpu.sh my.yaml
#SBATCH --job-name=jmarl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=jmarl-%j.txt
# Leave out --gpus-per-task=1: each task would then see its GPU as number 0 (jmarl takes it as that, other programs may not).

# All files are on a file system that the nodes share. --label writes the number of the task before each line.
# A task that fails tells the others, which end within a minute: --kill-on-bad-exit=0 lets them say why.
code=0
srun --label --kill-on-bad-exit=0 jmarl train --config "$1" --resume auto --distributed auto || code=$?

# 75: interrupted (by USR1, five minutes before the end of the time) and saved, so that the job can go on later.
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
