from pathlib import Path

import pytest

from polar_server.config import ConfigError, RolloutConfig, load_topology


def test_state_lies_below_the_users_state_folder_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    config = RolloutConfig()
    assert config.results_path == Path("/state/polar/server/results")
    assert config.token_path == Path("/state/polar/server/token")
    assert config.sqlalchemy_url == "sqlite+aiosqlite:////state/polar/server/polar.db"
    moved = RolloutConfig(data_dir=tmp_path, save_dir=Path("/results"), token_file=Path("/token"))
    assert (moved.results_path, moved.token_path) == (Path("/results"), Path("/token"))
    assert moved.sqlalchemy_url == f"sqlite+aiosqlite:///{tmp_path}/polar.db"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("sqlite:///a.db", "sqlite+aiosqlite:///a.db"),
        ("postgresql://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://u@h/d", "postgresql+asyncpg://u@h/d"),
    ],
)
def test_a_database_url_gets_an_asynchronous_driver(given: str, used: str):
    assert RolloutConfig(database_url=given).sqlalchemy_url == used


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (RolloutConfig(), "http://127.0.0.1:8080"),
        (RolloutConfig(host="0.0.0.0", port=9), "http://127.0.0.1:9"),
        (RolloutConfig(host="::", port=9), "http://[::1]:9"),
        (RolloutConfig(host="::1", port=9), "http://[::1]:9"),
        (RolloutConfig(public_url="https://polar.example/"), "https://polar.example"),
    ],
)
def test_where_the_server_is_reached(config: RolloutConfig, url: str):
    assert config.reachable_url == url


def test_an_old_topology_file_is_understood(tmp_path: Path):
    path = tmp_path / "topology.yaml"
    path.write_text(
        "rollout:\n  host: 0.0.0.0\n  port: 8080\n  save_dir: /results\n"
        "  dispatch_poll_interval_seconds: 1.0\n  callback_grace_seconds: 120\n"
        "  http_max_connections: 1024\n  http_max_keepalive_connections: 256\n"
        "  cleanup_max_concurrency: 128\n  cleanup_max_attempts: 3\n"
        "  cleanup_retry_backoff_seconds: 0.1\n"
        "gateway:\n  heartbeat_interval_seconds: 10\n  nodes:\n"
        "    - {id: a, port: 8100, inference: {scheduler: thunderagent}, model_pool: []}\n"
    )
    topology = load_topology(path)
    assert topology.rollout.results_path == Path("/results")
    assert topology.gateway.nodes[0].port == 8100


def test_the_environment_lies_over_the_file_and_overrides_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "topology.yaml"
    path.write_text("rollout: {port: 1, host: h}")
    monkeypatch.setenv("POLAR_ROLLOUT__PORT", "2")
    monkeypatch.setenv("POLAR_ROLLOUT__RETRY", "{max_attempts: 7}")
    topology = load_topology(path)
    assert (topology.rollout.port, topology.rollout.host) == (2, "h")
    assert topology.rollout.retry.max_attempts == 7
    assert load_topology(path, {"rollout.port": 3}).rollout.port == 3


def test_a_variable_names_a_nested_key_with_two_underscores_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLAR_ROLLOUT__RETRY__MAX_ATTEMPTS", "7")
    assert load_topology(None).rollout.retry.max_attempts == 7


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ("rollout: 3", "9", "rollout.port cannot be set: rollout is not a mapping"),
        ("{}", "[1", "POLAR_ROLLOUT__PORT is not YAML"),
        ("{}", "abc", r"at `\$.rollout.port`"),
    ],
)
def test_a_wrong_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: str, said: str
):
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    monkeypatch.setenv("POLAR_ROLLOUT__PORT", value)
    with pytest.raises(ConfigError, match=said):
        load_topology(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_submit_may_be_open_on_a_loopback_host(tmp_path: Path, host: str):
    path = tmp_path / "topology.yaml"
    path.write_text(f"rollout: {{host: '{host}', open_submit: true}}\ngateway: {{nodes: [{{id: a}}]}}")
    assert load_topology(path).rollout.open_submit


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rollout: {host: 0.0.0.0, open_submit: true}", "needs a loopback rollout.host"),
        ("rollout: {host: polar.example, open_submit: true}", "needs a loopback rollout.host"),
        (
            "{rollout: {open_submit: true}, gateway: {nodes: [{id: a, allow_unisolated: true}]}}",
            "allow_unisolated of node a",
        ),
    ],
)
def test_submit_is_never_open_to_the_network_or_to_harnesses(tmp_path: Path, text: str, said: str):
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_topology(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rollout: {prot: 1}", r"unknown field `prot` - at `\$.rollout`"),
        ("rollout: {port: 99999}", r"at `\$.rollout.port`"),
        ("[1]", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("a: 2024-99-99", "is not YAML"),
        ("gateway: {nodes: [{id: a, model_pool: [{alias: pool/x}]}]}", "model_pool of node a must be empty"),
        ("gateway: {nodes: [{id: a}, {id: a}]}", "must be unique"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_and_field(tmp_path: Path, text: str, said: str):
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_topology(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        load_topology(tmp_path / "nowhere")
