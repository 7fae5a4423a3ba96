"""The container examples parse and agree with each other and with the package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from matcha.cli import train
from matcha.distributed.links.peers import from_names

ROOT = Path(__file__).parent.parent


def test_compose_starts_one_torchrun_a_worker():
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    services = compose["services"]
    ranks = set()
    for service in services.values():
        assert service["entrypoint"] == ["torchrun"]
        command = " ".join(service["command"])
        assert f"--nnodes={len(services)}" in command
        assert "--master-addr=worker-0" in command
        ranks.add(int(re.search(r"--node-rank=(\d+)", command).group(1)))
    assert ranks == set(range(len(services)))
    assert "worker-0" in services


def test_kubernetes_job_has_a_rendezvous_that_resolves():
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    service, job = documents
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    container = pod["spec"]["containers"][0]
    arguments = container["args"]
    assert f"--nnodes={job['spec']['completions']}" in arguments
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    address = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--master-addr={address}" in arguments
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]


def test_the_elastic_set_finds_its_pods_by_name():
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "elastic.yaml").read_text()))
    service, pods = documents
    assert (service["kind"], pods["kind"]) == ("Service", "StatefulSet")
    name = service["metadata"]["name"]
    assert pods["spec"]["serviceName"] == name
    container = pods["spec"]["template"]["spec"]["containers"][0]
    port = container["ports"][0]["containerPort"]
    assert f"--peers={pods['metadata']['name']}-{{rank}}.{name}:{port}" in container["args"]
    assert "--elastic" in container["args"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pods["spec"]["template"]["spec"]["volumes"]}
    peers = from_names(f"{pods['metadata']['name']}-{{rank}}.{name}", pods["spec"]["replicas"])
    assert peers.addresses[7] == ("matcha-7.matcha", 29600)


def test_elastic_containers_have_their_own_keys_only_and_come_back():
    services = yaml.safe_load((ROOT / "deploy" / "compose-elastic.yaml").read_text())["services"]
    for rank in range(4):
        service = services[f"worker-{rank}"]
        assert service["restart"] == "on-failure"
        assert "--elastic" in service["entrypoint"]
        assert f"--rank={rank}" in service["command"]
        keys = {Path(volume.split(":")[0]).name for volume in service["volumes"]}
        assert keys == {"job", "authority.pem", f"worker-{rank}.pem", f"worker-{rank}.key"}
    (peers,) = {o for s in services.values() for o in s["command"] if o.startswith("--peers=")}
    names = from_names(peers.removeprefix("--peers=").removesuffix(":29600"), len(services))
    assert {host for host, _ in names.addresses} == set(services)


@pytest.mark.parametrize("name", ["elastic.yaml", "kubernetes.yaml"])
def test_manifests_are_what_kubernetes_takes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((ROOT / "deploy" / name).read_text()):
        kubernetes_validate.validate(document, "1.30", strict=True)
        document["spec"]["no such field"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_a_slurm_task_starts_its_worker_again(tmp_path):
    """The script under a srun and a matcha of our own: twice it fails, then it is through."""
    log = tmp_path / "log"
    commands = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=3 "$@"',
        "matcha": f'echo "$@" >> {log}; [ $(wc -l < {log}) -ge 3 ]',
        "sleep": ":",
    }
    for command, text in commands.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    job = {"SLURM_JOB_NAME": "matcha", "SLURM_JOB_ID": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    script = ROOT / "deploy" / "elastic.sbatch"
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=job, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(log.read_text().splitlines()) == 3
    assert "worker 3 ended with 1: again in 2 s" in done.stderr
    command = get_command(train.app).commands["train"]
    known = {name for option in command.params for name in option.opts}
    assert set(re.findall(r"--[a-z]+", log.read_text())) <= known


def test_dockerfile_copies_what_exists_and_installs_the_extra():
    text = (ROOT / "Dockerfile").read_text()
    steps = re.sub(r"\\\n\s*", " ", text).splitlines()
    steps = [step for step in steps if step and not step.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert {step.split()[0] for step in steps} <= known
    assert steps[0].startswith("FROM python:3.")
    for step in steps:
        if step.startswith("COPY"):
            for source in step.split()[1:-1]:
                assert (ROOT / source).exists(), source
    assert any("pip install" in step and ".[torch]" in step for step in steps)


@pytest.mark.parametrize(
    "name", ["compose.yaml", "compose-elastic.yaml", "elastic.yaml", "kubernetes.yaml"]
)
def test_examples_say_how_to_use_them(name):
    assert (ROOT / "deploy" / name).read_text().startswith("# ")
