#!/usr/bin/env bash
# Run everything that needs no GPU: lint, format, tests, a real vLLM engine on the CPU.
#
#     scripts/test.sh                     all of it, in an environment of its own
#     scripts/test.sh -k checkpoint -x    what follows goes to pytest
#     SPENSE_VENV=DIR scripts/test.sh     with the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

cpu_environment
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
ruff check .
ruff format --check .
# Two files at a time: most of the time goes into starting engines, one after the other.
python -m pytest -m "not gpu" -n 2 --dist loadfile "$@"
