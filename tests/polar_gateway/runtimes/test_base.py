"""What every runtime keeps, checked with each of ours."""

import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from polar_gateway.runtimes import archive
from polar_gateway.runtimes.base import Runtime, to_the_end
from polar_gateway.runtimes.trees import remove_tree
from tests.polar_gateway.runtimes.conftest import OpenPlace, alive, until

BINARY = bytes(range(256)) * 4096

ESCAPES = {
    "background": "sleep {t} & ",
    "deaf to hang-ups": "(trap '' HUP; exec sleep {t}) >/dev/null 2>&1 & ",
    "setsid": "setsid sleep {t} & ",
    "double fork": "(setsid sh -c 'sleep {t} & sleep {t}' &); ",
}


async def test_output_streams_and_exit_status_come_back_apart(place: Runtime) -> None:
    result = await place.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3)


@pytest.mark.parametrize("code", [0, 1, 126, 127, 255])
async def test_an_exit_status_is_the_commands_own(place: Runtime, code: int) -> None:
    assert (await place.exec(f"exit {code}")).return_code == code


async def test_a_command_killed_by_a_signal_has_the_shells_status_for_it(place: Runtime) -> None:
    assert (await place.exec("kill -9 $$")).return_code == 137


async def test_a_missing_program_is_the_commands_failure_and_not_the_runtimes(
    place: Runtime,
) -> None:
    result = await place.exec("no-such-program")
    assert result.return_code == 127
    assert "not found" in result.stderr


async def test_output_goes_to_callbacks_as_it_comes(place: Runtime) -> None:
    heard: list[tuple[str, bytes]] = []
    first = anyio.Event()

    def on_stdout(data: bytes) -> None:
        heard.append(("out", data))
        first.set()

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            result = await place.exec(
                'echo one; until [ -e "$SESSION_DIR/go" ]; do sleep 0.05; done; echo two >&2',
                on_stdout=on_stdout,
                on_stderr=lambda data: heard.append(("err", data)),
            )
            assert (result.stdout, result.stderr) == ("", "")

        tasks.start_soon(run)
        with anyio.fail_after(10):
            await first.wait()
        assert heard == [("out", b"one\n")]
        await place.write("/polar/session/go", b"")
    assert heard == [("out", b"one\n"), ("err", b"two\n")]


async def test_only_one_of_two_streams_may_have_a_callback(place: Runtime) -> None:
    heard: list[bytes] = []
    result = await place.exec("echo out; echo err >&2", on_stdout=heard.append)
    assert (heard, result.stdout, result.stderr) == ([b"out\n"], "", "err\n")


async def test_much_output_comes_quickly_and_whole(place: Runtime) -> None:
    sizes: list[int] = []
    began = time.monotonic()
    await place.exec("head -c 20000000 /dev/zero", on_stdout=lambda data: sizes.append(len(data)))
    assert sum(sizes) == 20_000_000
    assert time.monotonic() - began < 10


async def test_a_result_keeps_the_end_of_long_output(place: Runtime) -> None:
    result = await place.exec("head -c 20000000 /dev/zero; echo the end")
    assert len(result.stdout) == 8 << 20
    assert result.stdout.endswith("the end\n")


async def test_the_environment_is_the_specs_under_the_commands(open_place: OpenPlace) -> None:
    place = await open_place(spec={"env": {"A": "spec", "B": "spec"}})
    result = await place.exec('echo "$A $B"', env={"B": "quoted '\" $A"})
    assert result.stdout == "spec quoted '\" $A\n"


async def test_the_gateways_environment_stays_outside(
    open_place: OpenPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_SECRET", "hush")
    place = await open_place()
    assert "hush" not in (await place.exec("env")).stdout


async def test_commands_run_in_the_session_folder_unless_told_otherwise(place: Runtime) -> None:
    result = await place.exec('pwd; echo "$SESSION_DIR"; cd / && pwd')
    assert result.stdout == f"{place.session_dir}\n{place.session_dir}\n/\n"
    assert (await place.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"


async def test_a_workdir_in_the_session_folder_is_made(open_place: OpenPlace) -> None:
    place = await open_place(spec={"workdir": "/polar/session/work/deep"})
    assert (await place.exec("pwd")).stdout == f"{place.session_dir}/work/deep\n"


async def test_a_missing_folder_is_an_error_in_words(place: Runtime) -> None:
    with pytest.raises(RuntimeError, match=r"could not be started.*/no/such/folder"):
        await place.exec("true", cwd="/no/such/folder")


@pytest.mark.parametrize("size", [0, 100, 3_000_000])
async def test_standard_input_arrives_and_ends(place: Runtime, size: int) -> None:
    result = await place.exec("wc -c", stdin=b"x" * size)
    assert result.stdout.strip() == str(size)


async def test_a_command_need_not_read_its_input(place: Runtime) -> None:
    with anyio.fail_after(10):
        result = await place.exec("exit 4", stdin=b"x" * 3_000_000)
    assert result.return_code == 4


async def test_without_input_there_is_nothing_to_read(place: Runtime) -> None:
    assert (await place.exec("wc -c")).stdout.strip() == "0"


async def test_input_leaves_nothing_in_the_session_folder(place: Runtime) -> None:
    await place.exec("cat", stdin=b"secret")
    assert (await place.exec("ls -A")).stdout == ""


async def test_many_commands_run_at_once(place: Runtime) -> None:
    said: dict[int, str] = {}

    async def run(number: int) -> None:
        said[number] = (await place.exec(f"sleep 0.2; echo {number}")).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(run, number)
    assert said == {number: f"{number}\n" for number in range(8)}


async def test_files_and_folders_come_back_as_they_went(place: Runtime, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "binary").write_bytes(BINARY)
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "a name with 'quotes', ünïcode and spaces").touch()
    (tree / "deep" / "up").symlink_to("../run.sh")
    await place.upload(tree, "/polar/session/new/parents/tree")

    root = place.inside("/polar/session/new/parents/tree")
    assert (await place.exec("./deep/up && ls | wc -l", cwd=root)).stdout.split() == ["ran", "3"]

    back = tmp_path / "not" / "there"
    await place.download("/polar/session/new/parents/tree", back)
    assert sorted(path.relative_to(back) for path in back.rglob("*")) == sorted(
        path.relative_to(tree) for path in tree.rglob("*")
    )
    assert (back / "deep" / "er" / "binary").read_bytes() == BINARY
    assert os.access(back / "run.sh", os.X_OK)
    assert (back / "deep" / "up").readlink() == Path("../run.sh")
    assert place.notes == place.notes[:1]


async def test_an_upload_goes_into_a_folder_that_exists(place: Runtime, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "new").write_text("new")
    (tree / "both").write_text("new")
    await place.exec("mkdir d; echo old > d/old; echo old > d/both")
    await place.upload(tree, "/polar/session/d")
    assert (await place.exec("cat d/old d/both d/new")).stdout == "old\nnewnew"


async def test_a_single_file_goes_in_and_out(place: Runtime, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(BINARY)
    await place.upload(source, "/polar/session/a/b/file.bin")
    await place.download("/polar/session/a/b/file.bin", tmp_path / "out" / "copy")
    assert (tmp_path / "out" / "copy").read_bytes() == BINARY


async def test_a_link_in_the_source_path_is_followed_inside(place: Runtime, tmp_path: Path) -> None:
    await place.exec("mkdir real; echo x > real/file; ln -s real link")
    await place.download("/polar/session/link", tmp_path / "copy")
    assert (tmp_path / "copy" / "file").read_text() == "x\n"


async def test_uploading_or_downloading_what_is_not_there_names_it(
    place: Runtime, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        await place.upload(tmp_path / "nothing-here", "/polar/session/x")
    with pytest.raises(FileNotFoundError, match="nothing-there"):
        await place.download("/polar/session/nothing-there", tmp_path / "x")


async def test_links_and_pipes_that_lead_out_are_left_out_of_a_download(
    place: Runtime, tmp_path: Path
) -> None:
    await place.exec(
        "mkdir -p d/sub; echo good > d/file; ln -s /etc/passwd d/absolute; ln -s ../../x d/sub/up;"
        " ln -s sub d/fine; ln -s . d/here; ln -s here/here/../.. d/chain; mkfifo d/pipe"
    )
    await place.download("/polar/session/d", tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "file",
        "fine",
        "here",
        "sub",
    ]
    assert list((tmp_path / "d" / "sub").iterdir()) == []
    assert "left out" in place.notes[-1]
    assert "absolute" in place.notes[-1]


async def test_what_a_download_left_out_is_said_as_text(place: Runtime, tmp_path: Path) -> None:
    await place.exec("mkdir d; ln -s /etc/passwd \"d/$(printf 'a\\377\\033[2Jb')\"")
    await place.download("/polar/session/d", tmp_path / "d")
    assert place.notes[-1].isprintable()


@pytest.mark.parametrize("content", ["head -c 20000 /dev/zero > d/file", "touch d/file"])
async def test_more_than_is_bearable_does_not_come_out(
    place: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    await place.exec(f"mkdir d; {content}")
    monkeypatch.setattr(archive, "MAX_BYTES", 200)
    with pytest.raises(ValueError, match="/d' is larger than 200 bytes"):
        await place.download("/polar/session/d", tmp_path / "d")
    with (tmp_path / "tar").open("w+b") as file, pytest.raises(ValueError, match="is larger than"):
        await place.export("/polar/session/d", file)


async def test_folders_nested_deeper_than_a_stack_are_nothing_special(
    open_place: OpenPlace, tmp_path: Path
) -> None:
    place, fresh = await open_place(), await open_place()
    assert (await place.exec(f"mkdir -p w/{'d/' * 1100}")).return_code == 0
    with (tmp_path / "tar").open("w+b") as file:
        await place.export("/polar/session/w", file)
        await fresh.import_("/polar/session/w", file)
        await fresh.import_("/polar/session/w", file)
    assert (await fresh.exec("find w | wc -l")).stdout.strip() == "1101"
    await place.download("/polar/session/w", tmp_path / "w")
    remove_tree(tmp_path / "w")


async def test_a_folder_moves_to_another_place_just_as_it_is(
    open_place: OpenPlace, tmp_path: Path
) -> None:
    agent, fresh = await open_place(), await open_place()
    await agent.exec(
        "mkdir -p w/bin w/closed; echo x > w/file; ln w/file w/bin/twin; mkfifo w/pipe;"
        " ln -s /bin/sh w/bin/sh; ln -s ../../.. w/bin/up; ln -s nowhere w/dangling;"
        " ln -s /etc w/etc; touch w/.hidden \"w/$(printf 'a\\377b')\";"
        " chmod 500 w/closed; chmod 755 w/file; touch -d '2020-01-01 00:00' w/file w/bin"
    )
    await fresh.exec(
        "mkdir -p w/old/deep; echo x > w/old/deep/x; ln -s /etc w/oldlink; echo y > w/y"
    )
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        await agent.export("/polar/session/w", file)
        await fresh.import_("/polar/session/w", file)
    listing = (
        "cd w && ls -A | grep -v pipe && ls -l bin closed | cut -c1-10 && readlink bin/sh bin/up"
        " dangling etc; bin/sh -c 'echo ran'; stat -c '%a %Y' file bin closed; [ file -ef bin/twin ];"
        " echo $?"
    )
    there, here = await agent.exec(listing), await fresh.exec(listing)
    assert here.stdout == there.stdout
    assert here.stdout.endswith("\n0\n")
    assert "ran" in here.stdout
    assert (await fresh.exec("ls -A w/bin")).stdout.split() == ["sh", "twin", "up"]
    assert fresh.notes == agent.notes


async def test_moving_what_is_not_there_names_it(place: Runtime, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file, pytest.raises(FileNotFoundError, match="nothing"):
        await place.export("/polar/session/nothing", file)


async def test_a_written_file_has_its_mode_and_its_parents(place: Runtime) -> None:
    await place.write("/polar/session/x/y/secret", b"one")
    await place.write("/polar/session/x/y/tool", b"#!/bin/sh\necho ran", mode=0o755)
    await place.write("/polar/session/x/y/secret", b"two")
    listing = await place.exec("ls -l x/y | cut -c1-10; cat x/y/secret; x/y/tool")
    assert listing.stdout.split()[-3:] == ["-rw-------", "-rwxr-xr-x", "tworan"]


@pytest.mark.parametrize("how", ESCAPES)
async def test_a_timeout_kills_the_whole_tree(place: Runtime, how: str, token: str) -> None:
    heard: list[bytes] = []
    command = ESCAPES[how].format(t=token) + f"echo begun; sleep {token}"
    result = await place.exec(command, timeout=0.7, on_stdout=heard.append)
    assert result.return_code == -1
    assert heard == [b"begun\n"]
    await until(lambda: not alive(token), 2)


async def test_what_was_said_before_a_timeout_is_kept(place: Runtime) -> None:
    result = await place.exec("echo said; sleep 99", timeout=0.7)
    assert (result.return_code, result.stdout) == (-1, "said\n")


async def test_a_cancelled_exec_is_killed(place: Runtime, token: str) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(place.exec, f"setsid sleep {token} & sleep {token}")
        await until(lambda: len(alive(token)) >= 2)
        tasks.cancel_scope.cancel()
    await until(lambda: not alive(token), 2)
    assert (await place.exec("echo still here")).stdout == "still here\n"


async def test_a_failing_callback_ends_the_command(place: Runtime, token: str) -> None:
    def fail(_: bytes) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await place.exec(f"echo x; sleep {token}", on_stdout=fail)
    await until(lambda: not alive(token), 2)


async def test_a_command_ends_with_its_shell_and_leaves_its_background_running(
    place: Runtime, token: str
) -> None:
    with anyio.fail_after(10):
        result = await place.exec(f"sleep {token} & echo done")
    assert result.stdout == "done\n"
    await anyio.sleep(0.1)
    assert alive(token)


async def test_what_runs_in_the_background_may_go_on_talking(place: Runtime) -> None:
    await place.exec("(sleep 0.2; head -c 1000000 /dev/zero; touch said) & true")
    await place.exec("until [ -e said ]; do sleep 0.05; done", timeout=10)


@pytest.mark.parametrize(
    "how", [*ESCAPES.values(), "env -i setsid sh -c 'sleep {t} & sleep {t} &' >/dev/null 2>&1 & "]
)
async def test_cancel_kills_whatever_was_started_however_it_hides(
    place: Runtime, how: str, token: str
) -> None:
    await place.exec(how.format(t=token) + "sleep 0.1")
    await until(lambda: bool(alive(token)))
    await place.cancel()
    await until(lambda: not alive(token), 2)
    assert (await place.exec("echo alive")).stdout == "alive\n"


async def test_cancel_ends_a_running_exec(place: Runtime, token: str) -> None:
    codes: list[int] = []

    async def run() -> None:
        codes.append((await place.exec(f"sleep {token}")).return_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: bool(alive(token)))
        with anyio.fail_after(10):
            await place.cancel()
    assert codes == [137]


async def test_stop_is_possible_in_any_state(new_place: Callable[..., Runtime]) -> None:
    never_started = new_place()
    await never_started.stop()
    place = new_place()
    await place.start()
    await place.stop()
    await place.stop()
    with pytest.raises(RuntimeError):
        await place.exec("true")


async def test_stop_leaves_no_process(new_place: Callable[..., Runtime], token: str) -> None:
    place = new_place()
    await place.start()
    await place.exec(f"env -i setsid sleep {token} >/dev/null 2>&1 & sleep 0.1")
    await until(lambda: bool(alive(token)))
    await place.stop()
    await until(lambda: not alive(token), 2)


async def test_stop_leaves_no_file(new_place: Callable[..., Runtime]) -> None:
    place = new_place()
    await place.start()
    await place.exec("mkdir -p closed/in; echo x > closed/in/x; chmod 000 closed/in closed")
    await place.stop()
    assert list(place.request.scratch_dir.iterdir()) == []


async def test_stop_ends_a_running_exec(new_place: Callable[..., Runtime], token: str) -> None:
    place = new_place()
    await place.start()
    ended: list[str] = []

    async def run() -> None:
        try:
            ended.append(str((await place.exec(f"sleep {token}")).return_code))
        except RuntimeError as error:
            ended.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: bool(alive(token)))
        with anyio.fail_after(10):
            await place.stop()
    assert len(ended) == 1


async def test_unknown_settings_are_refused_by_name(open_place: OpenPlace) -> None:
    with pytest.raises(ValueError, match="volums"):
        await open_place(spec={"kwargs": {"volums": []}})


async def test_what_must_be_done_is_not_cancelled_but_bounded() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.cancel()
        with to_the_end("this"):
            await anyio.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"that was not done within 0.01 s"):  # noqa: SIM117
            with to_the_end("that", 0.01):
                await anyio.sleep_forever()


OWNER = """
import sys, anyio
from pathlib import Path
from polar_gateway.protocol import RuntimeSpec
from polar_gateway.runtimes import RUNTIMES
from polar_gateway.runtimes.base import RuntimeRequest

async def main(backend, image, scratch, token):
    place = RUNTIMES[backend](RuntimeRequest(
        session_id=token, attempt_id="1", owner=token, scratch_dir=Path(scratch), model_port=None,
        spec=RuntimeSpec(backend=backend, image=image or None),
    ))
    await place.start()
    await place.exec(f"env -i setsid sleep {token} >/dev/null 2>&1 & sleep 0.1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(place.exec, f"sleep {token}")
        print("ready", flush=True)

anyio.run(main, *sys.argv[1:])
"""


async def test_nothing_outlives_a_gateway_that_is_killed(
    backend: str, image: str | None, tmp_path: Path, token: str
) -> None:
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    arguments = [sys.executable, str(script), backend, image or "", str(tmp_path)]
    # The token is one of the owner's own arguments as well.
    async with await anyio.open_process([*arguments, token], stderr=None) as owner:
        assert owner.stdout is not None
        assert (await owner.stdout.receive()).startswith(b"ready")
        await until(lambda: len(alive(token)) >= 3)
        owner.kill()
        await owner.wait()
        await until(lambda: not alive(token), 5)
