import msgspec
import pytest

from polar_gateway.config import BackendConfig, GatewayConfig, InferenceConfig


def test_node_ids_must_differ() -> None:
    with pytest.raises(msgspec.ValidationError, match="a appears twice"):
        msgspec.convert({"nodes": [{"id": "a"}, {"id": "a"}]}, GatewayConfig)


def test_an_unknown_key_is_refused_with_its_path() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"max_rum_workers.*nodes\[0\]"):
        msgspec.convert({"nodes": [{"id": "a", "max_rum_workers": 2}]}, GatewayConfig)


def test_a_topology_written_for_the_known_keys_is_understood() -> None:
    node = msgspec.convert(
        {
            "heartbeat_interval_seconds": 5,
            "rollout_server_url": "http://127.0.0.1:8080",
            "completion_persistence": {"enabled": True, "max_field_bytes": 1048576},
            "nodes": [
                {
                    "id": "n1",
                    "host": "127.0.0.1",
                    "port": 8100,
                    "public_url": "http://127.0.0.1:8100",
                    "model_served": "tiny",
                    "inference": {"engine": "vllm", "base_url": "http://127.0.0.1:8000"},
                    "max_init_workers": 4,
                    "max_run_workers": 2,
                    "max_postrun_workers": 4,
                    "default_runtime": {"backend": "docker", "image": "debian"},
                }
            ],
        },
        GatewayConfig,
    ).nodes[0]
    assert node.port == 8100
    assert node.default_runtime is not None


def test_one_server_needs_no_list_and_several_have_one() -> None:
    one = msgspec.convert({"base_url": "http://a:1", "api_key_env": "KEY"}, InferenceConfig)
    assert one.servers == [BackendConfig(base_url="http://a:1", api_key_env="KEY")]
    several = [{"base_url": "http://a:1"}, {"base_url": "http://b:1", "name": "b"}]
    two = msgspec.convert({"backends": several}, InferenceConfig)
    assert [(each.base_url, each.name) for each in two.servers] == [
        ("http://a:1", None),
        ("http://b:1", "b"),
    ]


@pytest.mark.parametrize(
    ("inference", "said"),
    [
        ({"base_url": "http://c:1", "backends": [{"base_url": "http://a:1"}]}, "names all servers"),
        ({"api_key_env": "KEY", "backends": [{"base_url": "http://a:1"}]}, "names all servers"),
        ({"backends": [{"base_url": "http://a:1", "name": "a"}] * 2}, "a appears twice"),
        ({"backends": [{"name": "a"}]}, "base_url"),
        ({"backends": [{"base_url": "http://a:1", "name": "../a"}]}, "name"),
        ({"backends": [{"base_url": "http://a:1", "key": "x"}]}, "key"),
    ],
)
def test_servers_that_cannot_be_meant_are_refused(inference: object, said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(inference, InferenceConfig)
