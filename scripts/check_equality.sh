#!/usr/bin/env bash
# Sparse against dense serving on this GPU: 4 layers of Qwen3-32B's shape with random weights, FP8 and
# BF16, dense share 0, 0.25 and 0.5, and any checkpoints given. Needs an environment with a GPU vLLM,
# about 100 GB of free GPU memory (fifteen engines run side by side) and 40 GB of disk.
#
#     scripts/check_equality.sh benchmarks/equality-NVIDIA_H200.json [CHECKPOINT …]
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}

check() { # LABEL CHECKPOINT
    python3 "$scripts/convert.py" "$2" "$work/$1-twin" --dense-fp8
    python3 "$scripts/equality.py" compare "$2" "$work/$1-twin" --label "$1" --memory 0.06 \
        --json "$work/$1.json"
}

random() { # DTYPE SHARE
    label=qwen3-32b-4-layers-$1-dense-$2
    python3 "$scripts/make_model.py" qwen3-32b "$work/$label" --layers 4 --vocabulary 32000 \
        --dtype "$1" --dense-share "$2" --device cuda
    check "$label" "$work/$label"
}

jobs=()
for checkpoint in "$@"; do
    check "$(basename "$checkpoint")" "$checkpoint" &
    jobs+=($!)
done
for dtype in ${DTYPES:-fp8 bf16}; do
    for share in ${SHARES:-0 0.25 0.5}; do
        random $dtype $share &
        jobs+=($!)
    done
done
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
python3 "$scripts/equality.py" merge "$out" "$work"/*.json
exit $failed
