"""The image, the compose file and the example of `.env` keep what the documentation promises. No container is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.loading import load_settings
from server.settings import ENV_PREFIX, Settings, settings_env

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
SERVERS = ["server-gpu", "server-cpu"]
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The folder that a first call of the script makes."""
    shutil.copy(ROOT / "deploy" / "make-secrets", tmp_path)
    subprocess.run([tmp_path / "make-secrets"], check=True, capture_output=True)
    return tmp_path / "secrets"


def test_the_example_lists_every_setting() -> None:
    assert EXAMPLE.endswith(settings_env())


def test_the_example_shows_every_variable_of_the_compose_file_with_its_default() -> None:
    used: dict[str, set[str]] = {}
    for name, default in VARIABLE.findall(COMPOSE_TEXT):
        used.setdefault(name, set()).add(default)
    shown = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", EXAMPLE.removesuffix(settings_env()), re.MULTILINE))
    assert used.keys() | {"COMPOSE_PROFILES"} == shown.keys()
    for name, defaults in used.items():
        assert shown[name] in defaults


def test_no_variable_of_the_compose_file_looks_like_a_setting() -> None:
    assert not [name for name, _ in VARIABLE.findall(COMPOSE_TEXT) if name.startswith(ENV_PREFIX)]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_gets_settings_that_exist(name: str) -> None:
    own = [key for key in COMPOSE["services"][name]["environment"] if key.startswith(ENV_PREFIX)]
    assert {key.removeprefix(ENV_PREFIX).lower() for key in own} <= {*Settings.model_fields, "config"}


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_configuration_of_a_profile_is_accepted(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINEDRAFT_CONFIG", str(ROOT / "deploy" / "config" / f"{profile}.yml"))
    settings, rest = load_settings([])
    if profile == "gpu":
        assert settings.speculative_config is not None
        parts = int(rest[rest.index("--tensor-parallel-size") + 1])
        device = COMPOSE["services"]["server-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]
        assert device["count"] == f"${{GPU_COUNT:-{parts + 1}}}"


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_may_drain_before_it_is_killed(name: str) -> None:
    seconds = re.fullmatch(r"\$\{STOP_GRACE_PERIOD:-(\d+)s\}", COMPOSE["services"][name]["stop_grace_period"])
    assert seconds is not None
    assert int(seconds[1]) >= Settings.model_fields["drain_timeout"].default + 30


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_a_service_is_pinned_confined_and_knows_no_password(name: str) -> None:
    service = COMPOSE["services"][name]
    assert re.fullmatch(r"minedraft:(cpu|gpu|loadtest)|[a-z/]+:v?\d+\.\d+\.\d+", service["image"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service.get("profiles", [])) <= {"cpu", "gpu", "loadtest"}
    for key, value in service.get("environment", {}).items():
        assert not re.search("PASSWORD|KEY|TOKEN|SECRET", key) or str(value).startswith("/run/secrets/"), key
    for secret in service.get("secrets", []):
        assert (secret["source"] if isinstance(secret, dict) else secret) in COMPOSE["secrets"]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_writes_to_its_volumes_only(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert [volume for volume in service["volumes"] if not volume.endswith(":ro")] == ["models:/var/cache/minedraft"]


def test_every_mounted_folder_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).is_dir(), source


def test_the_images_are_made_from_the_lock_files_and_run_as_nobody_in_particular() -> None:
    assert re.findall(r"-r /locks/(requirements-\w+\.lock)", DOCKERFILE) == ["requirements-cpu.lock", "requirements-gpu.lock"]
    for target in ("cpu", "gpu"):
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert "\nUSER 10001:10001\n" in stage
        assert "\nHEALTHCHECK " in stage
        assert stage.rstrip().endswith('ENTRYPOINT ["minedraft", "serve"]')
    for source in re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists(), source


def test_secrets_are_random_and_kept(secrets: Path) -> None:
    before = {path.name: path.read_text() for path in secrets.iterdir()}
    assert before.keys() == {"api_keys", "grafana_admin_password", "hf_token", "prometheus_key"}
    client, prometheus = before["api_keys"].split()
    assert prometheus == before["prometheus_key"]
    assert len({client, prometheus, before["grafana_admin_password"]}) == 3
    assert min(map(len, (client, prometheus, before["grafana_admin_password"]))) == 64
    subprocess.run([secrets.parent / "make-secrets"], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == before
    assert secrets.stat().st_mode & 0o777 == 0o700


def test_the_key_of_prometheus_joins_keys_that_were_there(secrets: Path) -> None:
    (secrets / "api_keys").write_text("mine\n")
    subprocess.run([secrets.parent / "make-secrets"], check=True, capture_output=True)
    settings, _ = load_settings(["--api-key-file", str(secrets / "api_keys")])
    assert [key.get_secret_value() for key in settings.api_key] == ["mine", (secrets / "prometheus_key").read_text()]


def test_the_load_test_asks_the_server_that_runs_with_a_key_of_its() -> None:
    service = COMPOSE["services"]["loadtest"]
    command = service["command"]
    assert command[command.index("--host") + 1] == "http://minedraft:8000"
    assert command[command.index("--api-key-file") + 1] == "/run/secrets/api_keys"
    assert "api_keys" in service["secrets"]
    stage = DOCKERFILE.partition(" AS loadtest\n")[2].partition("\nFROM ")[0]
    assert "\nUSER 10001:10001\n" in stage
    assert stage.rstrip().endswith('ENTRYPOINT ["minedraft", "loadtest"]')
    assert "-r /locks" not in DOCKERFILE.partition("AS packages-loadtest\n")[2].partition("\nFROM ")[0]
