#!/usr/bin/env bash
# Train on several nodes with torchrun, and go on when a worker or a node is lost.
#
# Run it on every node, in any order. All need this folder and an --output-dir on a disk that they share:
#     HEAD=node1:29400 NODE=0 bash launch/torchrun.sh --batch-size 64 --output-dir /shared/run1    # on node1
#     HEAD=node1:29400 NODE=1 bash launch/torchrun.sh --batch-size 64 --output-dir /shared/run1    # on node2
# Flags go to train.py; relative paths start from its folder. Run it again to go on from the last checkpoint.
#
# Change, by environment variables:
#     HEAD        host:port of node 0, where all meet (the rendezvous). If that node is lost, so is the job:
#                 have whoever started this script start it again.
#     NODE        this node's number. Without it, torchrun compares host names to find out whether this is
#                 the HEAD, which fails where the host name leads to 127.0.1.1, as on Debian.
#     LOCAL_ADDR  this node's address as the others see it, where they cannot resolve its host name
#     MIN_NODES, MAX_NODES     train on as few as the first, on as many as the second (1 and 2). Any number
#                 gives the same result if number x processes divides --batch-size.
#     PROCESSES   a node's processes; auto: one a GPU, or one a core where there is no GPU
#     MAX_RESTARTS    failures after which the job ends (3): lost workers and lost nodes, not those that join
#     GRACE       seconds that workers have to end after a signal (100; torchrun itself would give them 30)
#     RDZV_CONF   torchrun's timing: wait 30 s for more nodes once MIN_NODES are there; a node that was not
#                 heard of for 3 x 5 s is lost
#     SCRIPT      what to train with (train.py)
#
# Ends with 0 when trained; with 143 when stopped by SIGTERM or SIGUSR1, after a checkpoint: run it again;
# with 1 when it failed more often than MAX_RESTARTS. Bad input is an error like any other to torchrun.
set -u
cd "$(dirname "$0")/.."
conf=${RDZV_CONF:-last_call_timeout=30,keep_alive_interval=5,keep_alive_max_attempt=3}
if [ -n "${NODE:-}" ]; then
    conf+=,is_host=$([ "$NODE" -eq 0 ] && echo true || echo false)
fi

# torchrun keeps one store of addresses for all its attempts. After a restart, a rank that is quicker than
# another finds that one's old address there and fails. With this, each attempt has a new store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

stopped=
trap 'stopped=yes; kill -TERM "$agent"' TERM USR1  # the agent passes it on to its workers

# Not "uv run torchrun": a signal then has one process less to go through.
python=$(uv run python -c "import sys; print(sys.executable)") || exit
"$python" -m torch.distributed.run \
    --nnodes "${MIN_NODES:-1}:${MAX_NODES:-2}" --nproc-per-node "${PROCESSES:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:29400}" --rdzv-id "${JOB:-train}" \
    --rdzv-conf "$conf" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} --max-restarts "${MAX_RESTARTS:-3}" \
    --shutdown-timeout "${GRACE:-100}" \
    "${SCRIPT:-train.py}" --resume auto "$@" &
agent=$!
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do  # a signal ends "wait" before the agent has ended
    wait "$agent"
    code=$?
done
if [ -n "$stopped" ] && [ "$code" -ne 0 ]; then
    code=143
fi
exit "$code"
