"""Runs one command and owns all that comes of it. A program, not a module: run by its path.

    supervise.py CONTROL_FD COMMAND...

It is the reaper of its descendants: whatever a process does to its session, its parents or its
environment, an orphan comes back here. So it can kill the whole tree, and knows when nothing of it is
left. It does so when the other end of CONTROL_FD closes, on request or because its owner died.

The command's output passes through it, and ends when the command does: what the command left in the
background lives on, and its output is dropped. A line on CONTROL_FD then gives the exit status as a
shell would (128 + the signal's number), and "alone" or "left" as nothing or something lives on. It
exits when nothing does.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 20
"""As much as a pipe holds, so that one read takes all that was said before it."""

_KILL_ROUNDS = 2000


def main(control: int, command: list[str]) -> None:
    os.set_inheritable(control, False)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deaths, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    pipes = {1: os.pipe(), 2: os.pipe()}
    child = start(command, {to: write for to, (_, write) in pipes.items()})
    os.close(0)
    for _, write in pipes.values():
        os.close(write)
    relays = {read: to for to, (read, _) in pipes.items()}

    selector = selectors.DefaultSelector()
    for descriptor in (control, deaths, *relays):
        selector.register(descriptor, selectors.EVENT_READ)
    running = True
    while True:
        ready = {key.fd for key, _ in selector.select()}
        for read in ready & relays.keys():
            if not relay(read, relays[read], heard=running):
                selector.unregister(read)
                del relays[read]
        if control in ready:
            # Nobody writes here: it became readable because the other end is gone.
            kill_all()
            return
        if deaths in ready:
            os.read(deaths, _CHUNK)
            statuses, any_left = reap()
            if child in statuses:
                running = False
                finish(relays)
                line = b"%d %s\n" % (statuses[child], b"left" if any_left else b"alone")
                os.write(control, line)
            if not any_left:
                return


def start(command: list[str], outputs: dict[int, int]) -> int:
    """Fork the command with its own session and default signals."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        for to, write in outputs.items():
            os.dup2(write, to)
        for number in (signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def relay(read: int, to: int, *, heard: bool) -> bool:
    """Pass on what is there; false at the end. Output that nobody hears is read and dropped."""
    data = os.read(read, _CHUNK)
    if data and heard:
        write_all(to, data)
    return bool(data)


def finish(relays: dict[int, int]) -> None:
    """Pass on what the command had said by its end, then close our own output."""
    for read, to in relays.items():
        os.set_blocking(read, False)
        with contextlib.suppress(BlockingIOError):
            relay(read, to, heard=True)
        os.set_blocking(read, True)
    for to in (1, 2):
        os.close(to)


def write_all(to: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(to, view) :]
    except BrokenPipeError:
        pass


def reap() -> tuple[dict[int, int], bool]:
    """Exit statuses of children that ended, by pid, and whether any child is left."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses, False
        if pid == 0:
            return statuses, True
        code = os.waitstatus_to_exitcode(status)
        statuses[pid] = code if code >= 0 else 128 - code


def kill_all() -> None:
    """Kill descendants until none is left.

    Bounded, for the sake of processes that became another user's and are beyond us.
    """
    for _ in range(_KILL_ROUNDS):
        strike(os.getpid())
        if not reap()[1]:
            return
        time.sleep(0.005)


def strike(root: int) -> None:
    """Kill all that descends from `root`. First it is stopped, as what is stopped cannot fork."""
    stopped: set[int] = set()
    while found := descendants(root) - stopped:
        for pid in found:
            send(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants(root: int) -> set[int]:
    """All live processes below `root`."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                text = stat.read()
                state, parent = text[text.rfind(b")") + 2 :].split()[:2]
                if state not in b"ZX":
                    parents[int(name)] = int(parent)
    found = {root}
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
