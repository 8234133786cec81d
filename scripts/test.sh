#!/usr/bin/env bash
# Run the whole test-suite in parts, each with a time limit, and show every part's summary at the end.
# A part of the machine that a test needs and that is missing here makes the test skip, or fail if
# POLAR_REQUIRE (comma separated: docker, clis, vllm) names it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "test: $*" >&2; }
required() { [[ ,${POLAR_REQUIRE:-}, == *,$1,* ]]; }

# Sets up one part of the machine; where that fails, its tests tell why by skipping or failing.
provide() {
    local part=$1
    shift
    SECONDS=0
    if "$@"; then
        say "$part is ready ($SECONDS s)"
    elif required "$part"; then
        say "$part is required and could not be set up"
        exit 1
    else
        say "no $part here; its tests will be skipped"
    fi
}

docker_daemon() {
    local said
    said=$(scripts/containers.sh up) && eval "$said"
}
real_vllm() { scripts/vllm.sh install && scripts/vllm.sh model; }

provide clis .venv/bin/polar harness install codex claude_code pi pi_old gemini_cli qwen_code opencode
provide docker docker_daemon
provide vllm real_vllm

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0
report=()

# part NAME MINUTES PYTEST-ARGUMENT...
part() {
    local name=$1 minutes=$2 log=$logs/$1 status
    shift 2
    echo
    echo "== $name =="
    SECONDS=0
    timeout --kill-after=30 --signal=INT "${minutes}m" .venv/bin/python -m pytest -q "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    ((status == 124 || status == 137)) && echo "$name ran past its $minutes minutes" | tee -a "$log"
    ((status == 0)) || failed=1
    report+=("$name: $SECONDS s, exit status $status")
    # pytest's own words: what failed, and the line that counts.
    mapfile -t -O "${#report[@]}" report < <(grep -E '^(FAILED|ERROR) |^(=+ )?[0-9]+ [a-z]+.* in [0-9.]+s' "$log")
}

part unit 8 -n 2 -m "not docker and not clis and not vllm"
part clis 20 -n 3 --dist worksteal -m "clis and not docker and not vllm"
part containers 12 -m "docker and not vllm"
part vllm 10 -m vllm

echo
echo "== summary =="
printf '%s\n' "${report[@]}"
exit "$failed"
