#!/usr/bin/env bash
# run_fuzz.sh TARGET [LIBFUZZER OPTION...]: runs a fuzz target in an empty folder beside it, for
# FUZZ_SECONDS (default 20), from the seeds in corpus/NAME and the words of NAME.dict where there
# are such, else from random seeds, the same each time. A crash leaves its input there and prints it
# in base64.
set -euo pipefail

target=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=$(basename "$target")
name=${name#fuzz_}
work=$target.work
rm -rf "$work"
mkdir -p "$work/corpus"
options=(-max_len=512)
if [ -d "$here/corpus/$name" ]; then
    cp "$here/corpus/$name"/* "$work/corpus"
    options=(-max_len=4096)
else # any bytes are a recipe (recipe.h): long ones reach every part of it at once
    python3 "$here/make_seeds.py" "$work/corpus"
    options+=(-len_control=0)
fi
if [ -f "$here/$name.dict" ]; then
    options+=("-dict=$here/$name.dict")
fi
cd "$work"
# Warnings of ctest's own environment stay out: the library reads these.
unset FLASH_KDA_CPU_ISA FLASH_KDA_PRECISION FLASH_KDA_NUM_THREADS
"$target" -max_total_time="${FUZZ_SECONDS:-20}" -timeout=20 -rss_limit_mb=2048 \
    -print_final_stats=1 "${options[@]}" "$@" corpus 2>log || {
    status=$?
    grep -av '^#' log | tail -n 60 >&2
    for file in crash-* oom-* timeout-* leak-*; do
        [ -e "$file" ] || continue
        echo "$file (base64):" >&2
        base64 "$file" >&2
    done
    exit "$status"
}
tail -n 8 log
