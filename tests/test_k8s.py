"""The Kubernetes manifests: valid to the letter, true to our exit codes, and their commands train."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import train_pretrain
from scripts import launch
from tests.conftest import ROOT, TINY, curve, free_port, write_texts
from tests.test_survival import until
from trainer.options import parse_options
from trainer.ownership import DONE, HOPELESS, STOPPED

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
yaml = pytest.importorskip("yaml")

FILES = ["single_node", "multi_node"]
# The oldest that has all we use, and the newest that the validator knows.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]


def manifest(name: str) -> dict[str, dict]:
    """The objects of a file, by kind."""
    documents = list(yaml.safe_load_all((ROOT / f"scripts/k8s/{name}.yaml").read_text(encoding="utf-8")))
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


def pod_of(name: str) -> dict:
    return manifest(name)["Job"]["spec"]["template"]["spec"]


def command_of(name: str, index: int = 0) -> list[str]:
    """The words that a pod's container ends up with: the shell's part done, the script's own after them."""
    (container,) = pod_of(name)["containers"]
    command, args = container["command"], container["args"]
    if command[0] == "sh":
        script = command[2].replace("$((JOB_COMPLETION_INDEX == 0))", str(int(index == 0)))
        assert command[:2] == ["sh", "-c"]
        assert script.startswith("exec "), "the launcher has to be process 1: signals go there"
        command = shlex.split(script.removeprefix("exec ").removesuffix(' "$@"'))
    return [*command, *args]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_object_is_valid_and_has_no_unknown_key(name: str, version: str) -> None:
    for document in manifest(name).values():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_key_would_be_found() -> None:
    job = manifest("single_node")["Job"]
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 120
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def action(rules: list[dict], code: int) -> str:
    """What Kubernetes does when the container ends with this code: the first rule that fits decides."""
    for rule in rules:
        codes = rule.get("onExitCodes")
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("name", FILES)
def test_exit_codes_mean_what_they_mean_everywhere(name: str) -> None:
    job, pod = manifest(name)["Job"]["spec"], pod_of(name)
    rules = job["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"] for container in pod["containers"]
    }
    # The server refuses what is not in order or names 0; the schemas do not know that.
    for values in [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]:
        assert values == sorted(set(values) - {0})
    actions = {code: action(rules, code) for code in (STOPPED, HOPELESS, launch.USAGE, 1, 137, 143)}
    assert actions == {75: "Ignore", 78: "FailJob", 2: "FailJob", 1: "Count", 137: "Count", 143: "Count"}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
    disruption = [rule for rule in rules if "onPodConditions" in rule]
    assert [(rule["action"], rule["onPodConditions"][0]["type"]) for rule in disruption] == [
        ("Ignore", "DisruptionTarget")
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_grace_period_is_twice_a_long_step_and_save(name: str) -> None:
    assert pod_of(name)["terminationGracePeriodSeconds"] >= 2 * (20 + 40)


@pytest.mark.parametrize("name", FILES)
def test_the_command_is_what_launcher_and_script_accept(name: str) -> None:
    words = command_of(name)
    assert words[:3] == ["python", "-m", "scripts.launch"]
    at = words.index("train_pretrain.py")
    launcher = launch.parse(words[3:], [])
    options = parse_options(train_pretrain.options(), words[at + 1 :])
    (container,) = pod_of(name)["containers"]
    job = manifest(name)["Job"]["spec"]
    assert int(launcher.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(launcher.nnodes.split(":")[-1]) == job["completions"] == job["parallelism"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(name)["volumes"]}
    # What the run writes has to be on the volume that outlives the pod.
    assert options.out_dir.startswith("out/")
    assert options.cache_dir.startswith("out/")
    claim = volumes[mounts[f"{container['workingDir']}/out"]]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest(name)["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_pods_find_the_first_one_by_the_name_that_the_service_gives_it() -> None:
    objects, pod = manifest("multi_node"), pod_of("multi_node")
    job, service = objects["Job"], objects["Service"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= labels.items()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = [word for word in command_of("multi_node") if word.startswith("--rdzv-endpoint=")]
    assert endpoint.startswith(f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:")
    assert objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


class Pod:
    """The container's command of multi_node.yaml on this machine: one rank, a tiny model, another address."""

    def __init__(self, index: int, folder: Path, port: int) -> None:
        (container,) = pod_of("multi_node")["containers"]
        command = [word.replace("train-0.train:29400", f"127.0.0.1:{port}") for word in container["command"]]
        command = [word.replace("--nproc_per_node=8", "--nproc_per_node=1") for word in command]
        data = ["--data_path", folder / "texts.jsonl", "--cache_dir", folder / "cache", "--out_dir", folder / "run"]
        options = [*TINY, *data, "--checkpoint_interval", 20, "--max_steps", 200]
        environment = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self.log = folder / f"pod{index}.log"
        with open(self.log, "ab") as log:
            words = [str(word) for word in [*command, "train_pretrain.py", *options]]
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def wait(self) -> int:
        return self.process.wait(timeout=120)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    write_texts(tmp_path / "texts.jsonl", 64)
    started: list[Pod] = []
    yield started
    for pod in started:
        pod.process.kill()
        pod.process.wait()


@pytest.mark.integration
def test_two_pods_stop_together_when_one_is_evicted_and_go_on_together(tmp_path: Path, pods: list[Pod]) -> None:
    metrics = tmp_path / "run/metrics.jsonl"
    port = free_port()
    pods += [Pod(index, tmp_path, port) for index in (1, 0)]  # the host comes last
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 10, 90, "step 10")
    pods[0].process.send_signal(signal.SIGTERM)
    assert [pod.wait() for pod in pods] == [STOPPED, STOPPED], [pod.log.read_text() for pod in pods]
    assert curve(tmp_path / "run")[-1][0] < 200
    port = free_port()
    pods += [Pod(index, tmp_path, port) for index in (0, 1)]
    assert [pod.wait() for pod in pods[2:]] == [DONE, DONE], [pod.log.read_text() for pod in pods]
    assert [point[0] for point in curve(tmp_path / "run")] == list(range(1, 201))
