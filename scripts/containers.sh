#!/bin/bash
# Gives a Debian machine without one a Docker daemon for the demo and the tests. Needs root.
#
#   eval "$(scripts/containers.sh up)"    installs what is missing, starts a daemon unless one
#                                         answers, prints `export DOCKER_HOST=...`
#   scripts/containers.sh down            stops the daemon that `up` started, and no other
#
# Both may be repeated. Everything but the socket lives below POLAR_CONTAINERS_DIR; images stay
# there from one `up` to the next.
set -euo pipefail

state=${POLAR_CONTAINERS_DIR:-/var/lib/polar-containers}
socket=/var/run/docker.sock
pidfile=$state/dockerd.pid
packages=(docker.io iptables busybox-static)

say() { echo "containers: $*" >&2; }

# True when a Docker daemon answers at the address in $1; asked without the docker command, which
# some releases package apart from the daemon.
answers() {
  local address=${1#unix://}
  [[ -S $address ]] && python3 - "$address" <<'PY' 2>/dev/null
import socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(5)
    s.connect(sys.argv[1])
    s.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
    sys.exit(b" 200 " not in s.recv(64))
PY
}

# The pid of the daemon that `up` started, if it still runs; one that was killed and that nobody has
# reaped yet has a name but no program.
running() {
  local pid
  pid=$(cat "$pidfile" 2>/dev/null) && [[ $(readlink "/proc/$pid/exe") == */dockerd ]] && echo "$pid"
}

install_missing() {
  local missing=() package
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
  # The package starts the daemon as a service where there is an init that can.
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2
}

# Starts a daemon and waits until it answers, or until it has ended.
start_daemon() {
  running >/dev/null || rm -f "$pidfile"
  # Not a child of this shell's session, so that it outlives the shell.
  setsid dockerd -H "unix://$socket" --data-root "$state/docker" --pidfile "$pidfile" \
    >"$state/dockerd.log" 2>&1 </dev/null &
  for _ in {1..300}; do
    answers "$socket" && return 0
    kill -0 $! 2>/dev/null || return 1
    sleep 0.1
  done
  return 1
}

up() {
  if [[ ${DOCKER_HOST:-unix://} == unix://* ]] && answers "${DOCKER_HOST:-$socket}"; then
    echo "export DOCKER_HOST=${DOCKER_HOST:-unix://$socket}"
    return
  fi
  ((EUID == 0)) || { say "no Docker daemon answers, and only root can start one"; exit 1; }
  mkdir -p "$state"
  install_missing
  if ! answers "$socket"; then
    mountpoint -q /sys/fs/cgroup || { say "/sys/fs/cgroup is not mounted"; exit 1; }
    # A daemon killed a moment ago may leave processes that nobody has reaped yet, and a new one
    # waits for them in vain; so there is a second try.
    start_daemon || { sleep 6; start_daemon; } || true
    answers "$socket" || { say "the Docker daemon did not start:"; tail -20 "$state/dockerd.log" >&2; exit 1; }
  fi
  echo "export DOCKER_HOST=unix://$socket"
}

down() {
  local pid
  pid=$(running) || { say "no daemon of ours is running"; return 0; }
  kill "$pid"
  for _ in {1..300}; do
    running >/dev/null || return 0
    sleep 0.1
  done
  say "the Docker daemon ($pid) did not stop within 30 s"
  exit 1
}

case ${1:-} in
  up | down) "$1" ;;
  *) echo "usage: $0 up|down" >&2; exit 2 ;;
esac
