#!/usr/bin/env bash
# sanitize.sh PROGRAM [TOOL...]: test_cuda_forward under compute-sanitizer's tools (all four unless
# named). Ends with one line a tool; fails when one found something.
#
#     bash tests/gpu/sanitize.sh build/cuda/tests/gpu/test_cuda_forward initcheck
set -euo pipefail

program=$1
shift
if [ $# = 0 ]; then set -- memcheck racecheck initcheck synccheck; fi
sanitizer=$(command -v compute-sanitizer || find /usr/local/cuda*/bin -name compute-sanitizer \
    -print -quit)
[ -n "$sanitizer" ] || {
    echo "sanitize.sh: no compute-sanitizer" >&2
    exit 2
}
lines=()
failed=0
for tool in "$@"; do
    options=(--tool "$tool" --error-exitcode 9)
    if [ "$tool" = memcheck ]; then options+=(--leak-check full); fi
    status=0
    began=$SECONDS
    output=$("$sanitizer" "${options[@]}" "$program" 2>&1) || status=$?
    printf '== %s\n%s\n' "$tool" "$output"
    # A test that is skipped tests nothing.
    case $output in *SKIPPED*) status=77 ;; esac
    if [ "$status" != 0 ]; then failed=1; fi
    lines+=("$tool: exit status $status, $((SECONDS - began)) s; $(tail -n 1 <<<"$output")")
done
printf '%s\n' "${lines[@]}"
exit "$failed"
