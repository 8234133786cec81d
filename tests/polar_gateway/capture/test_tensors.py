import hashlib
from pathlib import Path

import pytest

from polar_gateway.capture.journal import CaptureError
from polar_gateway.capture.tensors import store
from polar_gateway.engines.base import Tensor
from tests.polar_gateway.capture.test_journal import files_limited_to

ROUTED = Tensor("routed_experts", b"\x93NUMPY" + bytes(5000))


@pytest.mark.parametrize("sync", [False, True])
def test_a_tensor_is_kept_under_the_digest_of_what_it_holds(tmp_path: Path, sync: bool) -> None:
    [kept] = store(tmp_path, [ROUTED], sync=sync)
    digest = hashlib.sha256(ROUTED.data).hexdigest()
    assert (kept.name, kept.file) == ("routed_experts", f"tensors/{digest}.npy")
    assert (kept.sha256, kept.bytes) == (digest, len(ROUTED.data))
    assert (tmp_path / kept.file).read_bytes() == ROUTED.data


def test_what_is_sent_twice_is_kept_once(tmp_path: Path) -> None:
    other = Tensor("sampling_mask", b"\x93NUMPY")
    first, second = store(tmp_path, [ROUTED, other], sync=False)
    [again] = store(tmp_path, [ROUTED], sync=False)
    assert again == first != second
    assert len(list((tmp_path / "tensors").iterdir())) == 2


def test_a_full_disk_is_an_error_and_leaves_no_half_a_file(tmp_path: Path) -> None:
    with (
        files_limited_to(1000),
        pytest.raises(CaptureError, match=r"cannot keep a tensor in .*/tensors: File too large"),
    ):
        store(tmp_path, [ROUTED], sync=False)
    assert list((tmp_path / "tensors").iterdir()) == []
