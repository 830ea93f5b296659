#!/usr/bin/env bash
# Sparse against dense serving on this GPU: 4 layers of Qwen3-32B's shape with random weights, FP8 and
# BF16, dense share 0, 0.25 and 0.5, and any checkpoints given. Needs an environment with a GPU vLLM.
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
    python3 "$scripts/equality.py" compare "$2" "$work/$1-twin" --label "$1" --memory 0.12 \
        --json "$work/$1.json"
    rm -rf "$work/$1-twin"
}

random() { # DTYPE
    for share in 0 0.25 0.5; do
        label=qwen3-32b-4-layers-$1-dense-$share
        python3 "$scripts/make_model.py" qwen3-32b "$work/$label" --layers 4 --dtype "$1" \
            --dense-share "$share" --device cuda
        check "$label" "$work/$label"
        rm -rf "${work:?}/$label"
    done
}

random fp8 &
fp8=$!
random bf16 &
bf16=$!
wait $fp8
wait $bf16
for checkpoint in "$@"; do
    check "$(basename "$checkpoint")" "$checkpoint"
done
python3 "$scripts/equality.py" merge "$out" "$work"/*.json
