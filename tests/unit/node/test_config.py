"""Configuration is read once, checked at once, and a mistake says what, where, why and what next."""

from __future__ import annotations

from pathlib import Path

import pytest

from piped.__main__ import build_parser, main
from piped.config import ConfigError, load_coordinator, load_node


def write(folder: Path, text: str) -> Path:
    file = folder / "piped.toml"
    file.write_text(text)
    return file


def test_a_flag_overrides_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'state_dir = "/srv/a"\nname = "n1"\nslots = 3\n')
    config = load_node(file, {"slots": 2, "name": None})
    assert (config.state_dir, config.name, config.slots) == (Path("/srv/a"), "n1", 2)
    assert (config.coordinator, config.metrics, config.health) == ("127.0.0.1:7400", "127.0.0.1:9464", None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("slotz = 3", r"slotz: unknown key \(.*piped.toml\); did you mean 'slots'\?"),
        ('slots = "3"', r"slots: '3' \(.*piped.toml\) is of type str; int is needed"),
        ("slots = true", r"slots: True .* is of type bool; int is needed"),
        ("slots = 0", r"slots: 0 is outside 1"),
        ('name = "a b"', r"name: 'a b' is no node name"),
        ('coordinator = "host"', r"coordinator: 'host' is no address; write \"host:port\""),
        ('coordinator = "10.0.0.1:7400"', r"coordinator: '10.0.0.1:7400' is not a loopback address .*--insecure"),
        ('metrics = "0.0.0.0:9464"', r"metrics: '0.0.0.0:9464' is not a loopback address"),
        ("slots = ", r"piped.toml is not TOML: "),
    ],
)
def test_a_mistake_in_a_nodes_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_node(write(tmp_path, text), {"state_dir": tmp_path})


def test_plaintext_beyond_loopback_must_be_written_out(tmp_path: Path) -> None:
    flags = {"state_dir": tmp_path, "coordinator": "10.0.0.1:7400", "insecure": True}
    assert load_node(None, flags).coordinator == "10.0.0.1:7400"
    with pytest.raises(ConfigError, match=r"listen: '0\.0\.0\.0:7400' is not a loopback address"):
        load_coordinator(None, {"state_dir": tmp_path, "listen": "0.0.0.0:7400"})


def test_a_lease_shorter_than_two_beats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lease_ttl_s: 1.0 s is less than two beats of 1.0 s"):
        load_coordinator(None, {"state_dir": tmp_path, "lease_ttl_s": 1.0})


def test_labels_and_quotas_are_tables_and_a_flag_per_label_overrides_the_file(tmp_path: Path) -> None:
    node = write(tmp_path, 'labels = {rack = "a", gpu = ""}')
    assert load_node(node, {"state_dir": tmp_path}).labels == (("gpu", ""), ("rack", "a"))
    flags = vars(build_parser().parse_args(["node", "--label", "gpu=h100", "--label", "x=1"]))
    assert load_node(node, {"state_dir": tmp_path, "labels": flags["labels"]}).labels == (("gpu", "h100"), ("x", "1"))
    with pytest.raises(ConfigError, match=r"labels: -a=1 .* is no label"):
        load_node(None, {"state_dir": tmp_path, "labels": ["-a=1"]})
    quotas = write(tmp_path, "quotas = {ann = 8, bob = 0}")
    assert load_coordinator(quotas, {"state_dir": tmp_path}).quotas == (("ann", 8), ("bob", 0))
    with pytest.raises(ConfigError, match=r"quotas\.ann: 'x' .* is no number of slots"):
        load_coordinator(write(tmp_path, 'quotas = {ann = "x"}'), {"state_dir": tmp_path})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*nowhere\.toml: No such file"):
        load_node(tmp_path / "nowhere.toml", {"state_dir": tmp_path})


@pytest.mark.parametrize("command", ["node", "coordinator"])
def test_a_bad_configuration_exits_with_78(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert main([command, "--config", str(write(tmp_path, "beats = 1"))]) == 78
    assert f"piped {command}: beats: unknown key" in capsys.readouterr().err
    assert main([command]) == 78
    assert "state_dir: required" in capsys.readouterr().err


def test_systemds_state_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    assert load_coordinator(None, {}).state_dir == tmp_path


def test_an_address_that_no_interface_has_is_refused_with_those_there_are() -> None:
    from piped.node.devices import interface_of

    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*no interface of this machine has it .*127\.0\.0\.1 on lo"):
        interface_of("192.0.2.1")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["gpu"], r"labels: 'gpu' \(--labels\) has no '='; write KEY=VALUE, or gpu= for an empty value"),
        (["a=1", "a=2"], r"labels: a \(--labels\) is given twice, '1' and '2'; give it once"),
    ],
)
def test_a_label_without_a_value_or_with_two_is_refused(flags: list[str], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_node(None, {"state_dir": tmp_path, "labels": flags})


def test_a_quota_of_a_name_that_no_tenant_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quotas: 'Team A' \(.*\) can be no job's tenant"):
        load_coordinator(write(tmp_path, 'quotas = {"Team A" = 3}'), {"state_dir": tmp_path})
