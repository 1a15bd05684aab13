#!/usr/bin/env bash
# Train on one machine or several with torchrun. Run it on every machine with the same variables:
#
#   NODES=2 MASTER_ADDR=node-0 scripts/torchrun.sh model=llama3_8b parallel.shard=16 data.train=corpus output_dir=runs/a
#
# The degrees of parallel.* have to multiply to NODES x RANKS_PER_NODE. On several machines output_dir has to lie on
# storage that all of them share; resume=auto, which is added here, then goes on after any interruption.
set -euo pipefail

NODES="${NODES:-1}"                          # machines
RANKS_PER_NODE="${RANKS_PER_NODE:-gpu}"      # processes a machine: a number, or gpu for one for each GPU
MASTER_ADDR="${MASTER_ADDR:-localhost}"      # a machine that all others reach
MASTER_PORT="${MASTER_PORT:-29500}"          # a free port on it
JOB="${JOB:-kitforge}"                       # a name that these machines share, and no other run on MASTER_ADDR
RESTARTS="${RESTARTS:-0}"                    # how often ranks that died are started again
VERB="${VERB:-train}"                        # train, finetune or evaluate

# Torch's launcher would give ranks half a minute to finish their step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
# A start after a failure must not find what the start before it left at the meeting point.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Checkpoints travel over gloo, between the addresses that the names of the machines stand for.
if [[ "$NODES" != 1 && -z "${GLOO_SOCKET_IFNAME:-}" && "$(getent ahostsv4 "$(hostname)" 2>/dev/null)" == 127.* ]]; then
  echo "the name of this machine stands for itself only, as on Debian: other machines will not find it;" \
    "export GLOO_SOCKET_IFNAME with the name of the interface that they reach, such as eth0" >&2
fi

resume=()
case " $* " in
  *" output_dir="*) [[ "$VERB" == evaluate || " $* " == *" resume="* ]] || resume=(resume=auto) ;;
  *) [[ "$NODES" == 1 && "$RESTARTS" == 0 ]] || { echo "add output_dir=FOLDER on shared storage" >&2; exit 1; } ;;
esac

exec torchrun \
  --nnodes "$NODES" \
  --nproc-per-node "$RANKS_PER_NODE" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
  --rdzv-id "$JOB" \
  --max-restarts "$RESTARTS" \
  -m kitforge "$VERB" "$@" ${resume[@]+"${resume[@]}"}
