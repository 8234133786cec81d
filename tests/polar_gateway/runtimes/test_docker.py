import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from polar_gateway.protocol import RuntimeSpec
from polar_gateway.runtimes import docker
from polar_gateway.runtimes.base import PackMount, RuntimeRequest, RuntimeUnavailableError
from polar_gateway.runtimes.docker import DockerOptions, DockerRuntime
from tests.polar_gateway.runtimes.conftest import OpenPlace, alive, until


def spec(**fields: Any) -> RuntimeSpec:
    return RuntimeSpec(image="some:image", **fields)


def config(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    request = RuntimeRequest(
        session_id="s",
        attempt_id="a",
        scratch_dir=tmp_path,
        model_port=None,
        **{"owner": "node", "spec": spec(), **fields},
    )
    options = msgspec.convert(request.spec.kwargs, DockerOptions)
    return docker.container_config(request, options, host_cpus=2)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"network": "none"}, "none"),
        ({"network": "bridge"}, "bridge"),
        ({"network": "host"}, "bridge"),
        ({"network": None}, "bridge"),
        ({}, "bridge"),
        ({"network": "bridge", "allow_internet": False}, "none"),
        ({"network": "host", "allow_internet": False}, "none"),
    ],
)
def test_the_hosts_network_is_never_a_containers(fields: dict[str, Any], mode: str) -> None:
    assert docker.network(spec(**fields)).mode == mode


def test_who_asked_for_the_hosts_network_is_told() -> None:
    assert "bridge" in (docker.network(spec(network="host")).note or "")
    assert docker.network(spec(network="bridge")).note is None
    assert docker.network(spec(network="host", allow_internet=False)).note is None


def test_an_unknown_network_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"runtime.network 'container:other' is unknown"):
        docker.network(spec(network="container:other"))


def test_volumes_are_mounted_where_the_node_allows_it(tmp_path: Path) -> None:
    (tmp_path / "data" / "set").mkdir(parents=True)
    root = tmp_path / "data"
    assert docker.volumes([f"{root}/set:/set:ro", f"{root}:/all"], (root,)) == [
        f"{root}/set:/set:ro",
        f"{root}:/all:rw",
    ]


@pytest.mark.parametrize(
    ("volume", "complaint"),
    [
        ("/etc:/etc", "below none of the node's mount_roots"),
        ("{root}/../secret:/x", "below none of the node's mount_roots"),
        ("{root}/link:/x", "below none of the node's mount_roots"),
        ("{root}/nothing:/x", "does not exist on the node"),
        ("named:/x", "is not of the form"),
        ("{root}:relative", "is not of the form"),
        ("{root}:/x:ro,exec", "is not of the form"),
        ("{root}", "is not of the form"),
    ],
)
def test_other_volumes_are_refused_in_words(tmp_path: Path, volume: str, complaint: str) -> None:
    root = tmp_path / "root"
    (tmp_path / "secret").mkdir()
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=complaint):
        docker.volumes([volume.format(root=root)], (root,))


def test_without_mount_roots_nothing_may_be_mounted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mount_roots"):
        docker.volumes([f"{tmp_path}:/x"], ())


def test_a_container_is_bounded_and_unprivileged_by_default(tmp_path: Path) -> None:
    host = config(tmp_path)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == docker.DEFAULT_MEMORY_MB << 20
    assert host["PidsLimit"] > 0
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert "Privileged" not in host
    assert "CapAdd" not in host


def test_packs_are_mounted_read_only(tmp_path: Path) -> None:
    mount = PackMount(source=Path("/packs/pi"), target="/polar/packs/pi")
    binds = config(tmp_path, mounts=(mount,))["HostConfig"]["Binds"]
    assert binds == ["/packs/pi:/polar/packs/pi:ro"]


def test_more_cpus_than_there_are_become_all_there_are(tmp_path: Path) -> None:
    asked = spec(cpus=64, storage_mb=1)
    assert config(tmp_path, spec=asked)["HostConfig"]["NanoCpus"] == 2_000_000_000
    assert len(docker.limits_not_met(asked, host_cpus=2)) == 2
    assert docker.limits_not_met(spec(cpus=2), host_cpus=2) == []


def test_a_container_says_whose_it_is(tmp_path: Path) -> None:
    assert config(tmp_path, purpose="eval")["Labels"] == {
        "polar.owner": "node",
        "polar.session": "s",
        "polar.attempt": "a",
        "polar.purpose": "eval",
    }


@pytest.mark.parametrize(
    ("state", "age", "is_orphan"),
    [
        ("running", 1e6, False),
        ("paused", 1e6, False),
        ("exited", 0, True),
        ("dead", 0, True),
        ("created", 30, False),
        ("created", 3600, True),
    ],
)
def test_a_container_is_an_orphan_when_it_ended_or_never_started(
    state: str, age: float, is_orphan: bool
) -> None:
    assert docker.orphaned(state, age) is is_orphan


async def test_a_daemon_elsewhere_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://example.invalid:2375")
    with pytest.raises(RuntimeUnavailableError, match="a socket of this host"):
        async with docker.connected():
            pass


async def test_a_missing_daemon_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(RuntimeUnavailableError, match="no Docker daemon answers at unix://"):
        async with docker.connected():
            pass
    assert await DockerRuntime.unavailable() is not None


@pytest.mark.docker
@pytest.mark.parametrize("backend", ["docker"])
class TestContainers:
    async def test_a_missing_image_is_named(self, open_place: OpenPlace) -> None:
        with pytest.raises(
            RuntimeError, match=r"the image 'localhost:1/no/such' is not on this host"
        ):
            await open_place(spec={"image": "localhost:1/no/such"})

    async def test_a_spec_without_an_image_is_refused(self, open_place: OpenPlace) -> None:
        with pytest.raises(ValueError, match=r"runtime.image is required"):
            await open_place(spec={"image": None})

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"kwargs": {"user": "nobody-of-that-name"}}, "nobody-of-that-name"),
            ({"workdir": "/proc/x"}, "cannot hold a session"),
            ({"gpus": 64}, "cannot be run"),
        ],
    )
    async def test_a_failed_start_leaves_nothing(
        self, new_place: Callable[..., DockerRuntime], fields: dict[str, Any], complaint: str
    ) -> None:
        place = new_place(spec=fields)
        with pytest.raises(Exception, match=complaint):
            await place.start()
        await place.stop()
        assert await containers(place.request.owner) == []

    async def test_a_cancelled_start_leaves_nothing(
        self, new_place: Callable[..., DockerRuntime]
    ) -> None:
        for patience in (0.01, 0.03, 0.06, 0.1):
            place = new_place()
            with anyio.move_on_after(patience):
                await place.start()
            await place.stop()
            assert await containers(place.request.owner) == []

    async def test_only_the_model_is_reached_where_there_is_no_network(
        self, open_place: OpenPlace
    ) -> None:
        model, stopped = Model(), []

        async def serve(listener: socket.socket) -> Callable[[], None]:
            close = await model.serve(listener)
            return lambda: (close(), stopped.append(True))[0]

        with socket.create_server(("0.0.0.0", 0)) as other:
            place = await open_place(spec={"network": "none"}, model_port=1, serve_socket=serve)
            assert place.model_url == "http://127.0.0.1:8100"
            asked = await place.exec(f"wget -q -O - {place.model_url}/hello")
            assert asked.stdout == "you said GET /hello"
            port = other.getsockname()[1]
            for address in ("127.0.0.1", "172.17.0.1", "1.1.1.1"):
                refused = await place.exec(f"wget -T 2 -q -O - http://{address}:{port}/")
                assert refused.return_code != 0
            assert (await place.exec("ls /sys/class/net")).stdout.split() == ["lo"]
        await place.stop()
        assert stopped == [True]

    async def test_a_bridge_has_the_model_on_the_same_address(self, open_place: OpenPlace) -> None:
        place = await open_place(
            spec={"network": "bridge"}, model_port=1, serve_socket=Model().serve
        )
        asked = await place.exec(f"wget -q -O - {place.model_url}/")
        assert asked.stdout == "you said GET /"
        assert "eth0" in (await place.exec("ls /sys/class/net")).stdout

    async def test_packs_are_there_and_cannot_be_changed(
        self, open_place: OpenPlace, tmp_path: Path
    ) -> None:
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack" / "tool").write_text("#!/bin/sh\necho tool")
        (tmp_path / "pack" / "tool").chmod(0o755)
        mount = PackMount(source=tmp_path / "pack", target="/polar/packs/p")
        place = await open_place(mounts=(mount,))
        assert (await place.exec(place.inside("/polar/packs/p/tool"))).stdout == "tool\n"
        assert (await place.exec("touch /polar/packs/p/x")).return_code != 0

    async def test_another_user_owns_what_it_is_given(
        self, open_place: OpenPlace, tmp_path: Path
    ) -> None:
        place = await open_place(spec={"kwargs": {"user": "1000:1000"}, "workdir": "/work"})
        (tmp_path / "file").write_text("x")
        await place.upload(tmp_path / "file", "/polar/session/up/loaded")
        await place.write("/polar/session/writ/ten", b"x")
        said = await place.exec("id -u; touch here ../polar/session/up/too; cat", stdin=b"input\n")
        assert (said.stdout, said.stderr) == ("1000\ninput\n", "")
        owners = await place.exec("stat -c %u:%g /polar/session/*/* /work")
        assert set(owners.stdout.split()) == {"1000:1000"}

    async def test_a_kill_for_memory_is_noted(self, open_place: OpenPlace) -> None:
        place = await open_place(spec={"memory_mb": 32})
        result = await place.exec("dd if=/dev/zero of=/dev/null bs=128M count=1")
        assert result.return_code == 137
        assert "for memory (limit 32 MB)" in place.notes[-1]

    async def test_a_fork_bomb_is_cancelled(self, open_place: OpenPlace) -> None:
        place = await open_place(spec={"kwargs": {"pids_limit": 60}})
        await place.exec("bomb() { bomb | bomb & }; bomb >/dev/null 2>&1; sleep 0.5", timeout=5)
        await place.cancel()
        assert (await place.exec("echo alive")).stdout == "alive\n"

    async def test_a_place_that_killed_itself_is_gone_in_words(self, open_place: OpenPlace) -> None:
        place = await open_place()
        assert (await place.exec("kill -9 -1; sleep 10")).return_code == 137

        async def until_refused(use: Callable[[], Awaitable[object]]) -> None:
            with anyio.fail_after(20):
                while True:  # the daemon needs a moment to notice, and to take it away
                    await use()

        with pytest.raises(RuntimeError, match="is gone"):
            await until_refused(lambda: place.exec("true"))
        with pytest.raises(RuntimeError, match="is gone"):
            await until_refused(lambda: place.write("/polar/session/x", b""))
        await place.cancel()

    async def test_uploads_that_nobody_would_see_are_refused(self, open_place: OpenPlace) -> None:
        place = await open_place()
        with pytest.raises(ValueError, match="/dev/shm/x"):
            await place.write("/dev/shm/x", b"")
        with pytest.raises(ValueError, match="no absolute path"):
            await place.write("x", b"")

    async def test_secrets_are_not_in_argument_lists(
        self, open_place: OpenPlace, token: str
    ) -> None:
        place = await open_place()
        async with anyio.create_task_group() as tasks:
            secret = "hush" + token
            tasks.start_soon(lambda: place.exec(f"sleep {token}", env={"KEY": secret}))
            await until(lambda: bool(alive(token)))
            assert not alive(secret)
            tasks.cancel_scope.cancel()

    async def test_what_a_killed_gateway_left_is_removed_and_nothing_else(
        self, open_place: OpenPlace, busybox_image: str, tmp_path: Path
    ) -> None:
        running = await open_place(owner="node-1")
        async with docker.connected() as client:
            body = config(tmp_path, owner="node-1", spec=RuntimeSpec(image=busybox_image))
            about_to_start = await client.containers.create(body)
            body["HostConfig"]["AutoRemove"] = False
            body |= {"OpenStdin": False, "AttachStdin": False}
            ended = await client.containers.create(body)
            await ended.start()
            await ended.wait()
            try:
                assert await DockerRuntime.reap_orphans("node-2") == 0
                assert await DockerRuntime.reap_orphans("node-1") == 1
                assert ended.id not in await containers("node-1")
                assert about_to_start.id in await containers("node-1")
            finally:
                await about_to_start.delete(force=True)
        assert (await running.exec("echo alive")).stdout == "alive\n"

    async def test_a_folder_with_a_mount_in_it_is_not_replaced(
        self, open_place: OpenPlace, tmp_path: Path
    ) -> None:
        (tmp_path / "kept").touch()
        place = await open_place(
            spec={"kwargs": {"volumes": [f"{tmp_path}:/work/data"]}}, mount_roots=(tmp_path,)
        )
        with (tmp_path / "tar").open("w+b") as file:
            await place.export("/work", file)
            for target in ("/work", "/work/data", "/work/data/deep"):
                with pytest.raises(ValueError, match="volumes mounts '/work/data'"):
                    await place.import_(target, file)
        assert (tmp_path / "kept").exists()

    async def test_a_folder_keeps_its_owners_where_it_is_moved(
        self, open_place: OpenPlace, tmp_path: Path
    ) -> None:
        spec = {"kwargs": {"user": "1000:1000"}, "workdir": "/work"}
        agent, fresh = await open_place(spec=spec), await open_place(spec=spec)
        long = "n" * 200
        await agent.exec(
            f"mkdir {long}; touch {long}/{long}; ln -s {long}/{long} link; ln link twin"
        )
        with (tmp_path / "tar").open("w+b") as file:
            await agent.export("/work", file)
            await fresh.import_("/work", file)
        owners = await fresh.exec(
            f"stat -c %u:%g /work . {long} {long}/{long}; cat link; touch new"
        )
        assert (owners.stdout.split(), owners.stderr) == (["1000:1000"] * 4, "")


class Model:
    """Answers HTTP on the socket that it is given."""

    async def serve(self, listener: socket.socket) -> Callable[[], None]:
        server = await asyncio.start_server(self._answer, sock=listener)
        return server.close

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode().partition(" HTTP/")[0]
        body = f"you said {request}".encode()
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()


async def containers(owner: str) -> list[str]:
    async with docker.connected() as client:
        query = json.dumps({"label": [f"polar.owner={owner}"]})
        return [one.id for one in await client.containers.list(all="1", filters=query)]
