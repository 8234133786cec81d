"""A container's processes as its host sees them, and killing them.

Docker can start a process in a container but not end one: closing the stream of an exec leaves all of
it running. The kernel knows which processes are the container's, whatever they did to their sessions,
parents or environments, and the host's root may kill each; nothing of that depends on programs inside.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_PAUSE_SECONDS = 0.02


class Process(NamedTuple):
    pid: int
    parent: int
    session: int


Choice = Callable[[list[Process]], list[Process]]


def members(container_id: str) -> list[Process]:
    """The live processes of a container, also in cgroups that they made themselves."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or not belongs(pid := int(name), container_id):
            continue
        stat = _read(pid, "stat")
        # The name, in parentheses, may itself hold spaces and parentheses.
        state, parent, _group, session = stat[stat.rfind(b")") + 2 :].split()[:4] or [b"Z"] * 4
        if state not in b"ZX":
            found.append(Process(pid, int(parent), int(session)))
    return found


def belongs(pid: int, container_id: str) -> bool:
    """Whether the process is one of the container's; false when there is none."""
    return container_id.encode() in _read(pid, "cgroup")


def marked(processes: Iterable[Process], marker: str) -> list[Process]:
    """Those that carry `marker` in their environment, and all that descend from them or share a
    session with them; what cleared its environment, left the session and outlived its parents is
    not among them."""
    processes = list(processes)
    chosen = {p.pid for p in processes if marker.encode() in _read(p.pid, "environ")}
    size = -1
    while size != len(chosen):
        size = len(chosen)
        sessions = {p.session for p in processes if p.pid in chosen}
        chosen |= {p.pid for p in processes if p.parent in chosen or p.session in sessions}
    return [p for p in processes if p.pid in chosen]


def kill(container_id: str, chosen: Choice, rounds: int) -> bool:
    """Kill what `chosen` picks from the container's processes, until it picks none twice.

    Blocks for 20 ms a round. Returns whether it came to that within `rounds`; a process that forks
    faster than it is killed does not.
    """
    quiet = 0
    for _ in range(rounds):
        victims = chosen(members(container_id))
        quiet = 0 if victims else quiet + 1
        if quiet == 2:
            return True
        for victim in victims:
            _kill(victim.pid, container_id)
        time.sleep(_PAUSE_SECONDS)
    return False


def _kill(pid: int, container_id: str) -> None:
    """Kill exactly the process that was seen, never one of the host's that has got its number."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if belongs(pid, container_id):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def out_of_memory_kills(pid: int) -> int:
    """How often the kernel has killed for memory in the container of `pid`; 0 where it cannot be
    read. An exec that dies so leaves no other trace than the exit status 137."""
    for line in _read(pid, "cgroup").decode().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            file = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        elif controllers == "":
            file = f"/sys/fs/cgroup{path}/memory.events"
        else:
            continue
        try:
            with open(file) as counters:
                for counter in counters:
                    name, value = counter.split()
                    if name == "oom_kill":
                        return int(value)
        except FileNotFoundError:
            continue
    return 0


def _read(pid: int, file: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{file}", "rb") as content:
            return content.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
