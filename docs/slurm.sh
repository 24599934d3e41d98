#!/bin/bash
# A run on two nodes of eight GPUs on Slurm, from the root of the repository: `sbatch docs/slurm.sh model=gsm size=1p5b`. Its
# folder has to be on a disk that all nodes share. Given again, the same command goes on.
#SBATCH --job-name=gsm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# A warning comes five minutes before the time is up, and before a preemption, where the cluster's PreemptParameters have
# send_user_signal. Every rank of the run learns it, goes on to the end of its logging interval
# (trainer.log_every_n_steps), saves and ends; then the job goes back to the queue. SIGTERM, as scancel sends it, saves too
# where the interval ends before the cluster kills, but queues nothing.
WARNED=138

srun --kill-on-bad-exit=1 .venv/bin/python train.py trainer=fsdp \
    trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.num_nodes="$SLURM_NNODES" "$@" &
trap 'kill -USR1 $!' USR1
wait $!
code=$?
while kill -0 $! 2> /dev/null; do  # a signal ends a wait, not what is waited for
    wait $!
    code=$?
done
if [ "$code" -eq "$WARNED" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
