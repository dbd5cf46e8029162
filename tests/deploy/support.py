"""What the checks of deploy/ share: paths, tools, rendered manifests."""
import functools
import pathlib
import re
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".cache/tools"
CHART = ROOT / "deploy/helm/baton"
GOLDEN = ROOT / "tests/deploy/golden"
VALUES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))


def run(*argv, check=True, **options):
    result = subprocess.run([str(a) for a in argv], capture_output=True, text=True, **options)
    assert not check or result.returncode == 0, f"{argv}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result


def helm(*argv, check=True):
    return run(TOOLS / "bin/helm", *argv, check=check)


@functools.lru_cache(maxsize=None)
def render(name, *settings):
    """Every object of the chart with the example values `name` and further --set settings."""
    flags = [part for setting in settings for part in ("--set", setting)]
    text = helm("template", "baton", CHART, "--namespace", "inference", "--values", CHART / f"ci/{name}-values.yaml", *flags).stdout
    return [doc for doc in yaml.safe_load_all(text) if doc]


def kinds(objects, kind):
    return {doc["metadata"]["name"]: doc for doc in objects if doc["kind"] == kind}


def pod_templates(objects):
    """(name of the workload, component, pod template) of everything that makes pods."""
    for doc in objects:
        name = doc["metadata"]["name"]
        if doc["kind"] in ("Deployment", "StatefulSet"):
            yield name, doc["spec"]["template"]
        elif doc["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield f"{name}/{part}", doc["spec"]["leaderWorkerTemplate"][part]
        elif doc["kind"] == "Pod":
            yield name, doc


def seconds(text):
    """'150s' or '10m' as the binaries read it."""
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def flag(container, name):
    """The value of --name in a container's arguments."""
    found = [arg.split("=", 1)[1] for arg in container["args"] if arg.startswith(f"--{name}=")]
    assert len(found) == 1, (name, container["args"])
    return found[0]
