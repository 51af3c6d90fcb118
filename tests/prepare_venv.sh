#!/usr/bin/env bash
# prepare_venv.sh VENV [tree]: a virtual environment with PyTorch for the CPU and
# tests/requirements.txt, or only with what tests/tree needs. Does nothing when VENV already holds
# exactly that; the whole environment serves for tests/tree too.
set -euo pipefail

venv=$1
part=${2:-all}
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
torch=2.13.0
python=$(python3 -VV)
whole="$python torch $torch $(cat "$tests"/requirements*.txt | cksum)"
tree="$python tree $(cksum <"$tests/requirements-tree.txt")"

found=$(cat "$venv/ready" 2>/dev/null || true)
if [ "$found" = "$whole" ] || { [ "$part" = tree ] && [ "$found" = "$tree" ]; }; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() {
    "$venv/bin/python" -m pip "$@"
}
if [ "$part" = tree ]; then
    pip install --quiet -r "$tests/requirements-tree.txt"
    echo "$tree" >"$venv/ready"
    exit 0
fi
# PyPI's own Linux files carry gigabytes of CUDA: first a CPU build that pip is set up to find, then
# PyTorch's index of CPU builds.
if [ "$(uname -s)" = Linux ]; then
    pip install --quiet "torch==$torch+cpu" ||
        pip install --quiet --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
else
    pip install --quiet "torch==$torch"
fi
pip install --quiet -r "$tests/requirements.txt"
echo "$whole" >"$venv/ready"
