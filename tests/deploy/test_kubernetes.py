"""The Kubernetes manifest keeps what the documentation promises. No cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from server.loading import load_settings
from server.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
OBJECTS: dict[tuple[str, str], Any] = {
    (found["kind"], found["metadata"]["name"]): found
    for found in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "minedraft.yaml").read_text())
}
POD = OBJECTS["StatefulSet", "minedraft"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
CONFIG = OBJECTS["ConfigMap", "minedraft"]["data"]["config.yml"]


def test_the_configuration_is_that_of_the_compose_file() -> None:
    assert yaml.safe_load(CONFIG) == yaml.safe_load((ROOT / "deploy" / "config" / "gpu.yml").read_text())


def test_the_configuration_is_accepted_and_fits_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yml").write_text(CONFIG)
    monkeypatch.setenv("MINEDRAFT_CONFIG", str(tmp_path / "config.yml"))
    _, rest = load_settings([])
    gpus = int(rest[rest.index("--tensor-parallel-size") + 1]) + 1
    assert {SERVER["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")} == {str(gpus)}


def test_settings_exist() -> None:
    own = {variable["name"] for variable in SERVER["env"] if variable["name"].startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in own} <= {*Settings.model_fields, "config"}


def test_a_server_may_drain_before_it_is_killed() -> None:
    assert POD["terminationGracePeriodSeconds"] >= Settings.model_fields["drain_timeout"].default + 30


def test_every_mounted_volume_and_selected_label_is_there() -> None:
    claims = OBJECTS["StatefulSet", "minedraft"]["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in POD["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == volumes
    labels = OBJECTS["StatefulSet", "minedraft"]["spec"]["template"]["metadata"]["labels"]
    for (kind, _), found in OBJECTS.items():
        if kind == "Service":
            assert found["spec"]["selector"].items() <= labels.items()
            assert found["spec"]["ports"][0]["targetPort"] in {port["name"] for port in SERVER["ports"]}


def test_the_server_is_confined() -> None:
    context = SERVER["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["runAsNonRoot"] is True
