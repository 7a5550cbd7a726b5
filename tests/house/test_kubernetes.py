"""examples/k8s and examples/Dockerfile: what they start is a server of this package."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from sgl_kvtier import cli
from sgl_kvtier.config import parse_config
from sgl_kvtier.runtime import settings
from sgl_kvtier.sizes import parse_bytes

ROOT = Path(__file__).parents[2]
OBJECTS = {
    one["kind"]: one
    for one in yaml.safe_load_all((ROOT / "examples" / "k8s" / "kvtier.yaml").read_text())
}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
BUILT_FROM = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py")


def test_the_container_serves_with_the_settings_of_the_config_map(capsys, tmp_path):
    told = OBJECTS["ConfigMap"]["data"]["kvtier.json"]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    given = {**json.loads(told)["store"]}
    assert given["path"].startswith(mounts["cache"] + "/")
    file = tmp_path / "kvtier.json"
    file.write_text(told)
    words = [*CONTAINER["command"], *CONTAINER["args"]]
    assert words[0] == "kvtier" and f"{mounts['settings']}/kvtier.json" in words
    words = [str(file) if word.endswith("kvtier.json") else word for word in words]
    assert cli.main([*words[1:], "--print"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[command.index("--host") + 1] == "0.0.0.0"
    port = command[command.index("--port") + 1]
    assert port == str(CONTAINER["ports"][0]["containerPort"])
    assert "--enable-metrics" in command
    assert parse_config(json.loads(told)).store.capacity_bytes > 1 << 30


def test_who_reaches_the_service_needs_a_key_from_the_secret_that_the_page_creates():
    """SGLang answers /server_info with both keys where no --api-key is set."""
    made = {
        place["name"]: place["valueFrom"]["secretKeyRef"]
        for place in CONTAINER["env"]
        if "valueFrom" in place
    }
    words = CONTAINER["args"]
    keys = [
        made[words[words.index(flag) + 1].removeprefix("$(").removesuffix(")")]
        for flag in ("--api-key", "--admin-api-key")
    ]
    assert keys[0] != keys[1]
    page = (ROOT / "docs" / "manual" / "kubernetes.md").read_text("utf-8")
    (secret,) = re.findall(r"kubectl create secret generic .*", page)
    assert all(f" {key['name']} " in secret and f"={key['key']}=" in secret for key in keys)


def test_probes_and_the_scrape_need_no_key():
    auth = pytest.importorskip("sglang.srt.utils.auth")
    probes = {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
    (scraped,) = OBJECTS["ServiceMonitor"]["spec"]["endpoints"]
    for path in {*probes, scraped["path"]}:
        asked = {"method": "GET", "path": path, "authorization_header": None}
        normal = auth.AuthLevel.NORMAL
        keys = {"api_key": "a", "admin_api_key": "b"}
        assert auth.decide_request_auth(**asked, **keys, auth_level=normal).allowed


def test_the_home_of_a_user_without_one_is_on_the_volume():
    """SGLang compiles into it at the start: where it cannot be written, no server starts."""
    (home,) = (one["value"] for one in CONTAINER["env"] if one["name"] == "HOME")
    (cache,) = (one for one in CONTAINER["volumeMounts"] if one["name"] == "cache")
    assert home == cache["mountPath"] and not cache.get("readOnly")


def test_volumes_ports_and_labels_fit_together():
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in POD["volumes"]
    }
    names = {port["name"] for port in CONTAINER["ports"]}
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {(probe["path"], probe["port"]) for probe in probes} == {("/health", "http")}
    assert {port["targetPort"] for port in OBJECTS["Service"]["spec"]["ports"]} <= names
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["ServiceMonitor"]["spec"]["endpoints"][0]["path"] == "/metrics"


def test_the_overlay_for_llm_d_turns_kvtier_on_and_stores_below_its_volume(monkeypatch):
    file = ROOT / "examples" / "k8s" / "llm-d" / "kustomization.yaml"
    overlay = yaml.safe_load(file.read_text())
    (patch,) = overlay["patches"]
    deployment = yaml.safe_load(patch["patch"])
    assert deployment["kind"] == patch["target"]["kind"] == "Deployment"
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert settings.wanted_by_environment()
    store = parse_config({"store": settings.store_of_environment()}).store
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and store.path.startswith(mount["mountPath"] + "/")
    assert parse_bytes(volume["emptyDir"]["sizeLimit"] + "B") > store.capacity_bytes >= 400 << 30
    assert container["image"] == CONTAINER["image"]
    assert pod["securityContext"].items() <= POD["securityContext"].items()


def test_the_image_has_what_the_package_is_built_from_and_not_the_whole_checkout():
    """The checkout of somebody who followed README has 11 GB of libraries."""
    lines = (ROOT / "examples" / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == {*BUILT_FROM, "sgl_kvtier"}
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_has_a_release_that_the_package_supports():
    release = re.search(r"SGLANG=v([\d.]+)", (ROOT / "examples" / "Dockerfile").read_text())[1]
    low, high = re.search(r"sglang>=([\d.]+),<([\d.]+)", (ROOT / "setup.cfg").read_text()).groups()
    parts = [tuple(map(int, text.split("."))) for text in (low, release, high)]
    assert parts[0] <= parts[1] < parts[2]


def test_docker_runs_the_image_with_its_store_and_enough_shared_memory(capsys):
    page = (ROOT / "docs" / "manual" / "install.md").read_text("utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^docker run .*", page, flags=re.M)
    words = shlex.split(line)
    image = words.index(CONTAINER["image"].partition(":")[0])
    options, command = words[:image], words[image + 1 :]
    assert options[options.index("--gpus") + 1] == "all" and "--shm-size" in options
    mounted = [
        options[place + 1].split(":")[1] for place, word in enumerate(options) if word == "-v"
    ]
    store = command[command.index("--store") + 1]
    assert any(store.startswith(folder + "/") for folder in mounted)
    rest = command.index("--")
    assert cli.main([*command[1:rest], "--print", *command[rest:]]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed[printed.index("--host") + 1] == "0.0.0.0"
    port = printed[printed.index("--port") + 1]
    assert options[options.index("-p") + 1].endswith(f":{port}:{port}")
