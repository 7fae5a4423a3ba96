"""The container examples parse and agree with each other and with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from matcha.distributed.transports.links.peers import from_names

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


@pytest.mark.parametrize("name", ["compose.yaml", "elastic.yaml", "kubernetes.yaml"])
def test_examples_say_how_to_use_them(name):
    assert (ROOT / "deploy" / name).read_text().startswith("# ")
