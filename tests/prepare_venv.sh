#!/usr/bin/env bash
# prepare_venv.sh VENV: a virtual environment with PyTorch for the CPU and tests/requirements.txt.
# Does nothing when VENV already holds exactly that.
set -euo pipefail

venv=$1
requirements=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/requirements.txt
torch=2.13.0
wanted="$(python3 -VV) torch $torch $(cksum <"$requirements")"

if [ "$(cat "$venv/ready" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() {
    "$venv/bin/python" -m pip "$@"
}
# PyPI's own Linux files carry gigabytes of CUDA: first a CPU build that pip is set up to find, then
# PyTorch's index of CPU builds.
if [ "$(uname -s)" = Linux ]; then
    pip install --quiet "torch==$torch+cpu" ||
        pip install --quiet --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
else
    pip install --quiet "torch==$torch"
fi
pip install --quiet -r "$requirements"
echo "$wanted" >"$venv/ready"
