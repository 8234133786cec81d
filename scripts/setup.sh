#!/usr/bin/env bash
# Make or complete the virtual environment .venv: for running (`setup.sh`) or for development too
# (`setup.sh dev`). Does nothing when it is there and was made from the same versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-run}
python=${PYTHON:-python3}
venv=.venv

say() { echo "setup: $*" >&2; }

command -v "$python" >/dev/null || { say "needs Python 3.11 or newer as $python (or name one in PYTHON)"; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "needs Python 3.11 or newer; $python is $("$python" -V)"
    exit 2
}

wanted="$("$python" -V) $(cat pyproject.toml constraints.txt | cksum)"
for done in "$venv/.ready-$kind" "$venv/.ready-dev"; do
    [ "$(cat "$done" 2>/dev/null)" = "$wanted" ] && exit 0
done

say "installing Python packages into $venv"
SECONDS=0
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    say "cannot make a virtual environment; on Debian: apt install python3-venv"
    rm -rf "$venv"
    exit 2
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_ROOT_USER_ACTION=ignore
pip install pip hatchling editables
groups=()
[ "$kind" = dev ] && groups=(--group dev)
pip install --no-build-isolation --editable . "${groups[@]}"
echo "$wanted" >"$venv/.ready-$kind"
say "Python packages: $SECONDS s"
