import subprocess
import sys

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


def test_garbage_is_looked_for_rarely_but_still_found() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
