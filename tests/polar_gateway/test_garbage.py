import platform
import subprocess
import sys

import pytest

CYCLES = """
import gc, weakref
from polar_gateway.garbage import THRESHOLDS, collect_rarely

class Node:
    pass

collect_rarely()
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1_000
node = Node()
node.itself = node
gone = weakref.ref(node)
del node
kept = [[] for _ in range(2 * THRESHOLDS[0])]
assert gone() is None
"""

BLOCKS = """
from polar_gateway.garbage import LARGE, give_large_blocks_back

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096

give_large_blocks_back()
bytes(64 * LARGE)  # glibc now takes blocks of that size for common ones
before = resident()
stay = []
for size in range(2 * LARGE, 40 * LARGE, LARGE):
    large = [bytes(size) for _ in range(4)]
    stay.append(bytearray(LARGE // 8))
    del large
assert resident() - before < 2 * len(stay) * LARGE // 8, resident() - before
"""


def test_garbage_is_looked_for_rarely_but_still_found() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
def test_large_blocks_leave_no_holes_between_what_stays() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
