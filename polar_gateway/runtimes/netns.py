"""Listening on a port inside a container's own network namespace, from outside.

The container needs no helper and no route: it sees 127.0.0.1 and one open port there, and the
gateway accepts from it like from any other listener. A namespace is a property of a thread, so a
thread of its own enters, binds and dies; the socket it made stays in the namespace it was made in.
"""

import ctypes
import os
import socket
import threading
from concurrent.futures import Future

_CLONE_NEWNET = 0x40000000
_BACKLOG = 512


def listen(namespace: int, port: int) -> socket.socket:
    """Listen on 127.0.0.1:`port` of the namespace behind the file descriptor `namespace`.

    Blocks for about a millisecond. Raises PermissionError without CAP_SYS_ADMIN, OSError when the
    port is taken.
    """
    made: Future[socket.socket] = Future()

    def enter_and_listen() -> None:
        try:
            _set_network_namespace(namespace)
            made.set_result(_listener(port))
        except OSError as error:
            made.set_exception(error)

    threading.Thread(target=enter_and_listen, name="netns", daemon=True).start()
    return made.result()


def _set_network_namespace(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
