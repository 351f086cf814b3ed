#!/usr/bin/env bash
# Train on several nodes with torchrun, and go on when a worker or a node is lost.
#
# Run it on every node, in any order. All need this folder and an --output-dir on a disk that they share:
#     HEAD=node1:29400 NODE=0 bash launch/torchrun.sh --batch-size 64 --output-dir /shared/run1    # on node1
#     HEAD=node1:29400 NODE=1 bash launch/torchrun.sh --batch-size 64 --output-dir /shared/run1    # on node2
# Flags go to train.py; relative paths start from its folder. Run it again to go on from the last checkpoint.
#
# torchrun ends with 1 whatever code its workers had, so behind it a scheduler cannot tell 2 (something to mend)
# from 75 (run it again). The other files here therefore use Lightning's own launcher, or srun.
# Give no --max-hours: torchrun would start the workers that end by it again at once.
#
# Change, by environment variables:
#     HEAD          host:port of node 0, where all meet (the rendezvous). If that node is lost, so is the job.
#     NODE          this node's number. Without it, torchrun compares host names to find out whether this is
#                   the HEAD, which fails where the host name leads to 127.0.1.1, as on Debian.
#     LOCAL_ADDR    this node's address as the others see it, where they cannot resolve its host name
#     MIN_NODES, MAX_NODES    train on as few as the first, on as many as the second (1 and 2). Any number
#                   gives the same result within rounding; --batch-size needs a sample for each process.
#     PROCESSES     a node's processes; auto: one a GPU, or one a core where there is no GPU
#     MAX_RESTARTS  how often workers are started again after one, or a node, is lost (3)
cd "$(dirname "$0")/.." || exit

# torchrun keeps one store of addresses for all its attempts. After a restart, a rank that is quicker than
# another finds that one's old address there and fails. With this, each attempt has a new store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun passes on no SIGUSR1 unless it is told to. After a signal, all workers together have the seconds of
# --shutdown-timeout: for a step, for a checkpoint under way, and for the last one, of --grace (25) each.
exec uv run torchrun \
    --nnodes "${MIN_NODES:-1}:${MAX_NODES:-2}" --nproc-per-node "${PROCESSES:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:29400}" \
    ${NODE:+--rdzv-conf "is_host=$((NODE == 0))"} ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 90 \
    --max-restarts "${MAX_RESTARTS:-3}" train.py --resume auto "$@"
