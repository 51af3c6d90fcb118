#!/usr/bin/env bash
# run.sh: the GPU tests of the flash_kda that is installed, or of a wheel given as an argument.
#
#     bash tests/gpu/run.sh [WHEEL] [PYTEST ARGUMENT...]
#
# A wheel is unpacked next to the tests' build output and used from there: nothing is installed, and
# nothing needs a network. Without a GPU every test is skipped, with the reason. A run appends its
# record to tests/gpu/records.jsonl, or to the file that FLASH_KDA_GPU_RECORDS names.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
case ${1:-} in
*.whl)
    site=$root/build/gpu-site
    rm -rf "$site"
    mkdir -p "$site"
    "$python" -m zipfile -e "$1" "$site"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    shift
    ;;
esac
cd "$root"
exec "$python" -m pytest -q -rs -p no:cacheprovider tests/gpu "$@"
