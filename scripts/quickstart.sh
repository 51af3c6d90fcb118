#!/usr/bin/env bash
# quickstart.sh: installs what is missing, builds the library and the program, runs them on the
# bundled activations of a trained model, and shows how far the results are from float64.
#
#     bash scripts/quickstart.sh [ACTIVATIONS.safetensors]
#
# Everything it makes is in build/. It may be run again; only what changed is built.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
input=${1:-}
[ -z "$input" ] || input=$(cd "$(dirname "$input")" && pwd)/$(basename "$input")
cd "$root"
input=${input:-data/kda_trained_slice.safetensors}
results=build/quickstart
flashkda=build/release/tools/flashkda/flashkda
python=build/quickstart-venv/bin/python
mkdir -p "$results"

# step TEXT COMMAND...: output to a log, shown only when it fails.
step() {
    local text=$1 began=$SECONDS
    shift
    printf '%-48s' "$text"
    if "$@" >"$results/step.log" 2>&1 </dev/null; then
        echo "$((SECONDS - began)) s"
    else
        echo "failed"
        tail -n 30 "$results/step.log"
        exit 1
    fi
}

# Without a GPU, CUDA kernels would only take time to compile.
nvidia-smi -L >/dev/null 2>&1 || export FLASH_KDA_CUDA=${FLASH_KDA_CUDA:-OFF}

build() {
    cmake --preset release && cmake --build --preset release
}

# matplotlib, for the PNG only; without it (no network, say) the picture is text.
prepare_plot() {
    "$python" -c 'import matplotlib' 2>/dev/null && return
    python3 -m venv build/quickstart-venv
    "$python" -m pip install --quiet --disable-pip-version-check matplotlib || true
}

bash scripts/install_dependencies.sh compiler cmake ninja cjson python
step "Building the library and the program" build
step "Preparing the picture" prepare_plot

echo
echo "flashkda run $input"
"$flashkda" run "$input" -o "$results/out.safetensors"
echo
echo "flashkda check $input"
"$flashkda" check "$input" | tee "$results/check.txt"
"$flashkda" check --json "$input" >"$results/check.json"
echo
"$python" scripts/plot_check.py "$results/check.json" -o "$results/check.png" |
    tee "$results/check-picture.txt"

echo
"$python" - "$results" "$root" <<'PYTHON'
import json
import sys
from pathlib import Path

results, root = sys.argv[1:]
check = json.loads(Path(results, "check.json").read_text())
layers = check["layers"]
kernels = sorted({layer["kernel"] for layer in layers})
print("Summary")
print(f"  kernel        {', '.join(kernels)}, {layers[0]['threads']} threads")
print(
    f"  time          {sum(layer['ms'] for layer in layers):.1f} ms for "
    f"{sum(layer['tokens'] for layer in layers)} tokens of {len(layers)} layers "
    f"(the float64 definition: {sum(layer['reference_ms'] for layer in layers):.0f} ms)"
)
for name, note in ("out", "rounding to bf16 included"), ("state", "fp32"):
    worst = max(layers, key=lambda layer: layer[name]["ratio"])[name]
    print(
        f"  error, {name:<6} {worst['ratio']:.2e} of float64 at most, {note}; "
        f"bound {worst['bound']:.2e}"
    )
print(f"  output        {Path(root, results, 'out.safetensors')}")
picture = Path(root, results, "check.png")
if picture.exists():
    print(f"  picture       {picture}")
PYTHON
