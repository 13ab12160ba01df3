"""The files of examples/deploy: of the form that their readers want, and with commands that tacit takes."""

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from tacit.cli import build_parser

DEPLOY = Path(__file__).parents[1] / "examples" / "deploy"
AGGREGATOR = list(yaml.safe_load_all((DEPLOY / "kubernetes/aggregator.yaml").read_text()))
TRAINJOB = yaml.safe_load((DEPLOY / "kubernetes/trainjob.yaml").read_text())


def _of_kind(kind):
    (found,) = [document for document in AGGREGATOR if document["kind"] == kind]
    return found


def _unit():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "tacit-aggregate.service")
    return unit


def test_every_command_is_one_that_tacit_takes():
    container = _of_kind("Deployment")["spec"]["template"]["spec"]["containers"][0]
    image = re.search(r"^CMD (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.M)[1]
    commands = [shlex.split(_unit()["Service"]["ExecStart"]), container["args"], yaml.safe_load(image)]
    for words in commands:
        assert Path(words[0]).name == "tacit"
        args = build_parser().parse_args(words[1:])
        assert args.verb == "aggregate" and args.listen == "0.0.0.0:4800"


def test_ranks_and_aggregator_agree_on_name_port_secret_and_policy():
    service, deployment = _of_kind("Service"), _of_kind("Deployment")
    policy = _of_kind("NetworkPolicy")["spec"]
    pod = deployment["spec"]["template"]
    env = {variable["name"]: variable for variable in TRAINJOB["spec"]["trainer"]["env"]}
    assert env["TACIT_AGGREGATOR"]["value"] == f"{service['metadata']['name']}:4800"
    own = pod["spec"]["containers"][0]["env"][0]
    assert env["TACIT_AGGREGATOR_SECRET"] == own
    assert (
        service["spec"]["clusterIP"] == "None"
    )  # else addresses are translated, and packets dropped as 'source'
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["podSelector"]["matchLabels"] == labels
    ports = {(port["port"], port["protocol"]) for port in service["spec"]["ports"]}
    assert ports == {(4800, "TCP"), (4800, "UDP")}
    assert {(p["port"], p["protocol"]) for p in policy["ingress"][0]["ports"]} == ports


def test_no_file_holds_a_secret():
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not re.search(r"[0-9a-f]{32}", path.read_text()), path


def test_the_batch_file_is_a_shell_script():
    subprocess.run(["bash", "-n", str(DEPLOY / "train.sbatch")], check=True)
