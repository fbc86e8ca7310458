#!/bin/bash
# Tried on a one-node Slurm 22.05 without GPUs (whole runs of one task with two processes, a signal); not run: GPUs, several nodes.
#
# One task for each node, in which jmarl launch starts a process for each GPU, keeps its output and restarts all if one fails.
# Command: sbatch experiments/cluster/slurm_task_per_node.sh my.yaml
#SBATCH --job-name=jmarl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=jmarl-%j.txt

# The name of the first node must lead to it from the others: `getent hosts NAME` there says no address that begins with 127.
export FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PROCESSES=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
code=0
srun --label --kill-on-bad-exit=0 bash -c 'exec jmarl launch --nproc-per-node "$PROCESSES" --nnodes "$SLURM_NNODES" \
  --node-rank "$SLURM_NODEID" --master-addr "$FIRST_NODE" --master-port $((20000 + SLURM_JOB_ID % 10000)) --restarts 3 \
  -- train --config "$1" --resume auto' launch "$1" || code=$?

# 75: interrupted (by USR1, five minutes before the end of the time) and saved, so that the job can go on later.
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
