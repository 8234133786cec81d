from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from polar_gateway.runtimes.base import PackMount, Runtime
from polar_gateway.runtimes.local import LocalRuntime
from tests.polar_gateway.runtimes.conftest import OpenPlace, alive, until

pytestmark = pytest.mark.parametrize("backend", ["local"])


async def test_it_says_that_it_isolates_nothing(open_place: OpenPlace) -> None:
    place = await open_place()
    assert not place.isolated
    assert "isolates nothing" in place.notes[0]
    assert await LocalRuntime.unavailable() is None


async def test_limits_it_cannot_set_are_noted(open_place: OpenPlace) -> None:
    place = await open_place(spec={"cpus": 2, "memory_mb": 512, "image": "some:image"})
    assert len(place.notes) == 4


@pytest.mark.parametrize("fields", [{"allow_internet": False}, {"network": "none"}])
async def test_an_isolation_it_cannot_give_is_refused(
    open_place: OpenPlace, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="cannot be kept by local"):
        await open_place(spec=fields)


async def test_the_model_is_on_the_hosts_loopback(open_place: OpenPlace) -> None:
    place = await open_place(model_port=4321)
    assert place.model_url == "http://127.0.0.1:4321"


@pytest.mark.parametrize(
    ("path", "mapped"),
    [
        ("/polar/session", "{session}"),
        ("/polar/session/a/b", "{session}/a/b"),
        ("/polar/session/../session/a", "{session}/a"),
        ("/polar/session-other", "/polar/session-other"),
        ("/polar/packs/pi/bin/node", "/the/pack/bin/node"),
        ("/etc/passwd", "/etc/passwd"),
        ("relative", "relative"),
    ],
)
def test_paths_of_documents_are_those_of_its_folder(
    new_place: Callable[..., LocalRuntime], path: str, mapped: str
) -> None:
    place = new_place(mounts=(PackMount(source=Path("/the/pack"), target="/polar/packs/pi"),))
    assert place.inside(path) == mapped.format(session=place.session_dir)


async def test_home_and_temporary_folder_are_its_own(open_place: OpenPlace) -> None:
    place = await open_place()
    result = await place.exec('cd "$HOME" && cd "$TMPDIR" && echo "$HOME $TMPDIR"')
    for folder in result.stdout.split():
        assert Path(folder).is_relative_to(place.request.scratch_dir)


async def test_a_supervisor_ends_with_the_last_process_it_has(
    open_place: OpenPlace, token: str
) -> None:
    place = await open_place()
    await place.exec("true")
    assert supervisors() == []
    await place.exec(f"sleep {token} & true")
    (supervisor,) = supervisors()
    for pid in alive(token):
        psutil.Process(pid).kill()
    await until(lambda: not supervisor.is_running())
    await place.exec("true")


async def test_a_command_that_kills_its_supervisor_ends_as_killed(open_place: OpenPlace) -> None:
    place = await open_place()
    with anyio.fail_after(10):
        result = await place.exec("kill -9 $PPID; sleep 0.2")
    assert result.return_code == 137
    assert (await place.exec("echo alive")).stdout == "alive\n"


async def test_a_tree_that_keeps_forking_is_killed(open_place: OpenPlace, token: str) -> None:
    place = await open_place()
    await place.exec(
        f"(while :; do setsid sh -c 'sleep {token}' & sleep 0.01; done) & sleep 1", timeout=0.4
    )
    await until(lambda: not alive(token), 2)


async def test_cancel_ends_a_command_that_is_still_being_started(
    place: Runtime, token: str
) -> None:
    for turns in range(1, 40, 3):
        codes: list[int] = []

        async def run(codes: list[int] = codes) -> None:
            codes.append((await place.exec(f"sleep {token}")).return_code)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                await place.cancel()
        assert codes == [137]
    assert not alive(token)


STOPS_ITS_SUPERVISOR = "(setsid sleep {t} &); kill -STOP $PPID; sleep {t}"


async def test_a_command_that_stops_its_supervisor_is_timed_out(
    open_place: OpenPlace, token: str
) -> None:
    place = await open_place()
    with anyio.fail_after(8):
        result = await place.exec(f"echo said; {STOPS_ITS_SUPERVISOR.format(t=token)}", timeout=0.5)
    assert (result.return_code, result.stdout) == (-1, "said\n")
    assert not alive(token)
    assert supervisors() == []


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_place_with_a_stopped_supervisor_can_be(
    open_place: OpenPlace, token: str, how: str
) -> None:
    place = await open_place()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(place.exec, STOPS_ITS_SUPERVISOR.format(t=token))
        await until(lambda: [one.status() for one in supervisors()] == [psutil.STATUS_STOPPED])
        with anyio.fail_after(8):
            await getattr(place, how)()
        assert not alive(token)


async def test_an_escaped_process_that_holds_the_output_open_does_not_hold_up_the_command(
    open_place: OpenPlace, token: str
) -> None:
    place = await open_place()
    with anyio.fail_after(8):
        result = await place.exec(
            f"exec 3>/proc/$PPID/fd/1; echo said; setsid sleep {token} & sleep 0.2; kill -9 $PPID"
        )
    assert (result.return_code, result.stdout) == (137, "said\n")
    for pid in alive(token):
        psutil.Process(pid).kill()


async def test_a_link_out_of_the_session_is_not_followed(
    open_place: OpenPlace, tmp_path: Path
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "log").write_text("secret")
    place = await open_place()
    await place.exec(f"ln -s {tmp_path}/secrets logs; ln -s {tmp_path}/secrets/log log")
    for source in ("log", "logs", "logs/log"):
        with pytest.raises(ValueError, match=f"{source}' leads out of the folders"):
            await place.download(f"/polar/session/{source}", tmp_path / "out")
        with (tmp_path / "tar").open("w+b") as file, pytest.raises(ValueError, match="leads out"):
            await place.export(f"/polar/session/{source}", file)
    assert not (tmp_path / "out").exists()


async def test_no_folder_of_the_host_is_replaced(open_place: OpenPlace, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    place = await open_place()
    await place.exec(f"mkdir w; ln -s {tmp_path} link")
    with (tmp_path / "tar").open("w+b") as file:
        await place.export("/polar/session/w", file)
        for target in (str(tmp_path), "/polar/session/link", "/polar/session/.."):
            with pytest.raises(ValueError, match=r"is no folder of session .* but of the host"):
                await place.import_(target, file)
    assert (tmp_path / "kept").exists()


def supervisors() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if any("supervise.py" in word for word in child.cmdline())
    ]
