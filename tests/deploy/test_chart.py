"""The Helm chart: it lints, renders to the golden files, fits Kubernetes' schemas, and its numbers and flags hold together."""
import filecmp
import json
import os
import re
import sys

import pytest
import yaml

import crd_schema
import support
from support import CHART, GOLDEN, ROOT, TOOLS, VALUES, flag, helm, kinds, pod_templates, render, run, seconds

BIN = ROOT / os.environ.get("BATON_BUILD_DIR", "build") / "bin"
WORKLOADS = [pytest.param(name, id=name) for name in VALUES]


def leaves(node, schema, prefix=""):
    """Paths of all values; an object that the schema leaves open is one value."""
    for key, value in node.items():
        path, inner = f"{prefix}{key}", schema["properties"][key]
        if isinstance(value, dict) and "properties" in inner:
            yield from leaves(value, inner, path + ".")
        else:
            yield path


def chart_values():
    return yaml.safe_load((CHART / "values.yaml").read_text())


def test_lint():
    for name in VALUES:
        helm("lint", "--strict", CHART, "--values", CHART / f"ci/{name}-values.yaml")


def test_rendered_chart_equals_the_golden_files(tmp_path):
    run(ROOT / "scripts/render_chart.sh", tmp_path)
    for name in VALUES:
        assert filecmp.cmp(tmp_path / f"{name}.yaml", GOLDEN / f"{name}.yaml", shallow=False), f"{name}: run scripts/render_chart.sh"
    for name in ("cpu", "split", "slice"):
        for file in ("manifests.yaml", "kustomization.yaml"):
            committed = ROOT / "deploy/kustomize/bases" / name / file
            assert filecmp.cmp(tmp_path / "bases" / name / file, committed, shallow=False), f"{committed}: run scripts/render_chart.sh"


def test_kustomize_overlay_equals_its_golden_file():
    text = run(TOOLS / "bin/kubectl", "kustomize", ROOT / "deploy/kustomize/overlays/example").stdout
    assert text == (GOLDEN / "kustomize-example.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    assert {doc["metadata"].get("namespace") for doc in objects} == {"chat"}
    for name in ("split", "slice"):
        run(TOOLS / "bin/kubectl", "kustomize", ROOT / "deploy/kustomize/bases" / name)


@pytest.mark.parametrize("name", [*WORKLOADS, pytest.param("kustomize-example", id="kustomize")])
def test_objects_fit_the_schemas_of_kubernetes_and_of_their_crds(name):
    import kubernetes_validate
    objects = list(yaml.safe_load_all((GOLDEN / "kustomize-example.yaml").read_text())) if name == "kustomize-example" else render(name)
    schemas = crd_schema.load(TOOLS / "crds")
    assert len(objects) > 8
    for doc in objects:
        schema = schemas.get((doc["apiVersion"], doc["kind"]))
        if schema is not None:
            crd_schema.validate(doc, schema)
        else:
            for version in ("1.34", "1.36"):
                kubernetes_validate.validate(doc, version, strict=True)


def test_the_model_volume_is_the_one_that_the_chart_mounts():
    import kubernetes_validate
    claim, loader = yaml.safe_load_all((ROOT / "deploy/model-volume.yaml").read_text())
    for doc in (claim, loader):
        for version in ("1.34", "1.36"):
            kubernetes_validate.validate(doc, version, strict=True)
    assert claim["metadata"]["name"] == loader["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert loader["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == chart_values()["model"]["mountPath"]
    mounted = {"name": "model", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"], "readOnly": True}}
    assert all(mounted in template["spec"]["volumes"] for workload, template in pod_templates(render("cpu")) if workload != "baton-test")


def test_what_is_set_takes_the_place_of_a_default_and_does_not_join_it():
    """Helm merges maps: a source beside a source would be refused by Kubernetes, which no schema says."""
    objects = render("split", "model.volume.nfs.server=files", "model.volume.nfs.path=/m", "router.pdb.minAvailable=1", "decode.pdb.maxUnavailable=2")
    for workload, template in pod_templates(objects):
        if workload != "baton-test":
            assert {"name": "model", "nfs": {"server": "files", "path": "/m"}} in template["spec"]["volumes"], workload
    limits = {name: {k: v for k, v in doc["spec"].items() if k != "selector"} for name, doc in kinds(objects, "PodDisruptionBudget").items()}
    assert limits == {"baton-router": {"minAvailable": 1}, "baton-prefill": {"minAvailable": 1}, "baton-decode": {"maxUnavailable": 2}}


@pytest.mark.parametrize("name", [*WORKLOADS, pytest.param("kustomize-example", id="kustomize")])
def test_volumes_and_budgets_say_one_thing(name):
    objects = list(yaml.safe_load_all((GOLDEN / "kustomize-example.yaml").read_text())) if name == "kustomize-example" else render(name)
    for workload, template in pod_templates(objects):
        assert all(len(volume) == 2 for volume in template["spec"].get("volumes", [])), workload
    assert all(len(doc["spec"]) == 2 for doc in kinds(objects, "PodDisruptionBudget").values())


def test_the_crd_checker_finds_what_is_wrong():
    schemas = crd_schema.load(TOOLS / "crds")
    monitor = kinds(render("slice"), "PodMonitor")["baton"]
    schema = schemas[(monitor["apiVersion"], "PodMonitor")]
    for path, value in ((("spec", "podMetricsEndpoints", 0, "intervall"), "15s"), (("spec", "selector"), "all"), (("spec", "podMetricsEndpoints", 0, "interval"), "soon")):
        broken = json.loads(json.dumps(monitor))
        node = broken
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        with pytest.raises(crd_schema.Invalid):
            crd_schema.validate(broken, schema)


@pytest.mark.parametrize("settings, words", [
    ("router.replica=1", "replica"), ("layout=ring", "layout"), ("layout=slice,topology=single", "topology"), ("decode.gpus=3", "gpus"),
    ("device=cuda,decode.gpus=0", "gpus"), ("device=cuda,decode.tp=2,decode.gpus=1", "gpus"), ("device=cuda,prefill.tp=2,prefill.gpus=1", "gpus"), ("ports.grpc=80", "grpc"), ("model.kvDtype=int3", "kvDtype"), ("image.digest=sha256:1", "digest"),
    ("tls.enabled=true", "secretName"), ("tls.enabled=true,tls.secretName=x", "serverName"),
    ("layout=lws,decode.autoscaling.enabled=true", "autoscaling"), ("decode.chunkTokens=32", "chunkTokens"), ("prefill.replicas=0", "replicas"), ("autoscaling.scaleDownStabilizationSeconds=1801", "scaleDownStabilizationSeconds"),
    ("model.volume.emptyDir.medium=Memory,model.volume.nfs.path=/", "volume"), ("decode.pdb.minAvailable=1,decode.pdb.maxUnavailable=1", "pdb"),
])
def test_the_schema_refuses_values_that_cannot_work(settings, words):
    result = helm("template", "baton", CHART, "--set", settings, check=False)
    assert result.returncode != 0 and words in result.stderr, result.stderr


def test_readme_explains_every_value():
    paths = set(leaves(chart_values(), json.loads((CHART / "values.schema.json").read_text())))
    explained = set(re.findall(r"^\| `([\w.]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE)) - {"split", "slice", "lws", "layout"} | {"layout"}
    assert explained == paths, (explained ^ paths)
    assert set(re.findall(r"`ci/(\w[\w-]*)-values.yaml`", (CHART / "README.md").read_text())) == set(VALUES)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """What the chart mounts under /etc/baton, as files."""
    folder = tmp_path_factory.mktemp("etc")
    for name in ("tls", "tokens"):
        (folder / name).mkdir()
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", folder / "tls/tls.key", "-out", folder / "tls/tls.crt", "-days", "2", "-subj", "/CN=test")
    (folder / "tls/ca.crt").write_bytes((folder / "tls/tls.crt").read_bytes())
    (folder / "tokens/tokens").write_text("test secret:0123456789abcdef\n")
    return folder


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_port_has_tls_or_says_that_it_has_none(name):
    for workload, template in pod_templates(render(name)):
        for container in template["spec"]["containers"]:
            args = container["args"]
            if container["command"][0] == "baton":
                continue
            assert ("--allow-plaintext" in args) != any(a.startswith("--tls-cert=") for a in args), workload
            if "--allow-plaintext" not in args and container["command"][0] != "baton-router":
                assert any(a.startswith("--tls-client-ca=") for a in args), "workers take only our own"
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            for argument in args:
                if "/etc/baton/" in argument:
                    assert os.path.dirname(argument.split("=", 1)[1]) in mounted, argument


@pytest.mark.parametrize("name", WORKLOADS)
def test_flags_are_those_of_the_binaries(name, secrets):
    """Each rendered command line is taken apart by the binary itself: it must fail for the model that is not there, and for nothing else."""
    seen = 0
    for workload, template in pod_templates(render(name)):
        for container in template["spec"]["containers"]:
            binary = container["command"][0]
            text = run(BIN / binary, *([container["args"][0]] if binary == "baton" else []), "--help").stdout
            known = set(re.findall(r"^  --([a-z0-9-]+)$", text, re.MULTILINE))
            for argument in container["args"]:
                if argument.startswith("--"):
                    assert argument[2:].split("=")[0] in known, f"{workload}: {binary} has no {argument}"
            if binary != "baton":
                args = [a.replace("$(POD_IP)", "127.0.0.1").replace("/etc/baton", str(secrets)) for a in container["args"]]
                result = run(BIN / binary, *args, check=False)
                assert result.returncode == 1 and flag(container, "model") in result.stderr, result.stderr
            seen += 1
    assert seen >= 4


# Case 16.3
@pytest.mark.parametrize("name", WORKLOADS)
def test_startup_probes_wait_for_the_largest_load(name):
    values = {**chart_values()["model"], **yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text()).get("model", {})}
    needed = 60 + values["sizeGiB"] / values["minLoadGiBPerSecond"]
    for workload, template in pod_templates(render(name)):
        for container in template["spec"]["containers"]:
            if container["command"][0] == "baton":
                continue
            startup, liveness, readiness = (container[f"{probe}Probe"] for probe in ("startup", "liveness", "readiness"))
            if container["command"][0] != "baton-router":
                assert startup["periodSeconds"] * startup["failureThreshold"] >= needed, workload
            health = int(flag(container, "health-port"))
            assert all(probe["grpc"]["port"] == health for probe in (startup, liveness, readiness))
            # Alive is not ready: a worker that drains or has lost its peers must not be killed for it.
            assert liveness["grpc"]["service"] == "liveness" and readiness["grpc"]["service"] in ("readiness", "baton.v1.Generation")


# Case 16.2, as Kubernetes sees it.
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_parts_of_a_stop_add_up(name):
    for workload, template in pod_templates(render(name)):
        spec = template["spec"]
        for container in spec["containers"]:
            if container["command"][0] == "baton":
                continue
            pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            readiness = container["readinessProbe"]
            assert pause >= readiness["periodSeconds"] * readiness["failureThreshold"], "balancers notice before the end"
            drain = seconds(flag(container, "drain-timeout"))
            assert pause + drain + 20 <= spec["terminationGracePeriodSeconds"], workload
    longest = max(template["spec"].get("terminationGracePeriodSeconds", 0) for _, template in pod_templates(render(name)))
    for scaler in kinds(render(name), "HorizontalPodAutoscaler").values():
        down = scaler["spec"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= longest and down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": down["stabilizationWindowSeconds"]}]


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_fit_the_restricted_profile(name):
    check_restricted_profile(name, [*pod_templates(render(name)), ("model loader", list(yaml.safe_load_all((ROOT / "deploy/model-volume.yaml").read_text()))[1])])


def check_restricted_profile(name, templates):
    for workload, template in templates:
        spec = template["spec"]
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), workload
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0 and context["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "csi", "image"}, volume
        for container in spec["containers"]:
            own = container["securityContext"]
            allowed = [["IPC_LOCK"]] if name == "split" and container["command"][0] in ("baton-prefill", "baton-decode") else [None]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True, workload
            assert own["capabilities"]["drop"] == ["ALL"] and own["capabilities"].get("add") in allowed, workload
            mounts = {mount["name"]: mount for mount in container.get("volumeMounts", [])}
            assert workload == "model loader" or all(mount.get("readOnly") for name, mount in mounts.items() if name != "tmp"), workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_routers_are_told_of_workers_that_exist(name):
    objects = render(name)
    services = kinds(objects, "Service")
    pods = set()
    for set_name, doc in kinds(objects, "StatefulSet").items():
        scaler = [s["spec"].get("maxReplicas", s["spec"].get("maxReplicaCount")) for kind in ("HorizontalPodAutoscaler", "ScaledObject")
                  for s in kinds(objects, kind).values() if s["spec"]["scaleTargetRef"]["name"] == set_name]
        assert ("replicas" in doc["spec"]) == (not scaler), "an autoscaler and a fixed number fight"
        service = services[doc["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"].items() <= doc["spec"]["template"]["metadata"]["labels"].items()
        pods |= {f"{set_name}-{i}.{service['metadata']['name']}" for i in range(scaler[0] if scaler else doc["spec"]["replicas"])}
    for set_name, doc in kinds(objects, "LeaderWorkerSet").items():
        for i in range(doc["spec"]["replicas"]):
            pods |= {f"{set_name}-{i}.{set_name}", f"{set_name}-{i}-1.{set_name}"}
    router = kinds(objects, "Deployment")["baton-router"]["spec"]["template"]["spec"]["containers"][0]
    told, ports = set(), {}
    for role in ("prefill", "decode"):
        if flag(router, "topology") == "single" and role == "prefill":
            assert not any(arg.startswith("--prefill=") for arg in router["args"])
            continue
        for address in flag(router, f"{role}").split(","):
            host, port = address.rsplit(":", 1)
            told.add(host)
            ports.setdefault(role, set()).add(int(port))
    assert told == pods
    for _, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            role = container["command"][0].removeprefix("baton-")
            if role in ports:
                assert ports[role] == {int(flag(container, "listen").rsplit(":", 1)[1])}


def reaches(policies, labels_from, labels_to, port, same_namespace=True):
    """Whether the NetworkPolicies let a pod open a connection to a port of another, both directions looked at."""
    def selects(selector, labels):
        if not all(labels.get(k) == v for k, v in (selector.get("matchLabels") or {}).items()):
            return False
        return all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []) if e["operator"] == "In")

    def allowed(policies, direction, own, other):
        applying = [p for p in policies if direction in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], own)]
        if not applying:
            return True
        for policy in applying:
            for rule in policy["spec"].get(direction.lower(), []):
                peers = rule.get("from" if direction == "Ingress" else "to")
                if rule.get("ports") and port not in [p["port"] for p in rule["ports"]]:
                    continue
                if not peers or any(same_namespace and "podSelector" in p and selects(p["podSelector"], other) for p in peers):
                    return True
        return False

    outgoing = allowed(policies, "Egress", labels_from, labels_to) if same_namespace else True
    return outgoing and allowed(policies, "Ingress", labels_to, labels_from)


@pytest.mark.parametrize("name", ["cpu", "slice", "lws"])
def test_network_policies_let_through_what_is_needed_and_nothing_else(name):
    objects = render(name)
    policies = list(kinds(objects, "NetworkPolicy").values())
    pods, ports = {}, {}
    for _, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            role = container["command"][0].removeprefix("baton-")
            if role != "baton":
                pods[role], ports[role] = template["metadata"]["labels"], int(flag(container, "listen").rsplit(":", 1)[1])
    decode = next(c for _, t in pod_templates(objects) for c in t["spec"]["containers"] if c["command"] == ["baton-decode"])
    kv = int(flag(decode, "kv-listen").rsplit(":", 1)[1])
    client, test = {"app": "web"}, next(t["metadata"]["labels"] for n, t in pod_templates(objects) if n == "baton-test")
    assert reaches(policies, client, pods["router"], ports["router"]) and reaches(policies, test, pods["router"], ports["router"])
    assert reaches(policies, client, pods["router"], 8000) and not reaches(policies, client, pods["router"], 50081)
    for role in ("prefill", "decode"):
        assert reaches(policies, pods["router"], pods[role], ports[role])
        assert not reaches(policies, client, pods[role], ports[role]), "only routers call workers"
        assert not reaches(policies, client, pods[role], ports[role], same_namespace=False)
        assert not reaches(policies, pods[role], pods["router"], ports["router"])
    assert reaches(policies, pods["prefill"], pods["decode"], kv) and reaches(policies, pods["prefill"], pods["decode"], ports["decode"])
    assert not reaches(policies, pods["router"], pods["decode"], kv) and not reaches(policies, client, pods["decode"], kv)
    assert not reaches(policies, test, pods["decode"], ports["decode"])
    chosen = list(kinds(render(name, "networkPolicy.clients[0].podSelector.matchLabels.app=web"), "NetworkPolicy").values())
    assert reaches(chosen, client, pods["router"], ports["router"]) and not reaches(chosen, {"app": "other"}, pods["router"], ports["router"])
    assert reaches(chosen, test, pods["router"], ports["router"]), "helm test asks, whoever the clients are"


def test_disruption_budgets_cover_every_workload():
    for name in VALUES:
        objects = render(name)
        budgets = [doc["spec"] for doc in kinds(objects, "PodDisruptionBudget").values()]
        for workload, template in pod_templates(objects):
            if workload != "baton-test":
                matching = [b for b in budgets if b["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()]
                assert len(matching) == 1, (name, workload)


def test_a_slice_shares_one_claim_between_its_workers():
    pod = kinds(render("slice"), "StatefulSet")["baton-slice"]["spec"]["template"]["spec"]
    claim = kinds(render("slice"), "ResourceClaimTemplate")["baton-slice"]
    assert pod["shareProcessNamespace"] is True and pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "baton-slice"}]
    assert claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
    seen = []
    for container in pod["containers"]:
        assert container["resources"]["claims"] == [{"name": "gpus"}] and "nvidia.com/gpu" not in container["resources"]["limits"]
        seen.append(next(e["value"] for e in container["env"] if e["name"] == "CUDA_VISIBLE_DEVICES"))
    assert seen == ["0,1", "1,0"], "each sees both devices, and has one of its own"
    wide = kinds(render("slice", "prefill.gpus=2", "decode.gpus=2"), "StatefulSet")["baton-slice"]["spec"]["template"]["spec"]["containers"]
    assert [next(e["value"] for e in c["env"] if e["name"] == "CUDA_VISIBLE_DEVICES") for c in wide] == ["0,1,2,3", "2,3,0,1"]


def test_a_tensor_parallel_pair_is_one_pod_with_two_devices():
    objects = render("tp2")
    for role in ("prefill", "decode"):
        assert kinds(objects, "ResourceClaimTemplate")[f"baton-{role}"]["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
        assert len(kinds(objects, "StatefulSet")[f"baton-{role}"]["spec"]["template"]["spec"]["containers"]) == 1
    plugin = kinds(render("tp2", "dra.enabled=false"), "StatefulSet")["baton-decode"]["spec"]["template"]["spec"]["containers"][0]
    assert plugin["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_ranks_are_a_flag_of_the_side_that_has_them():
    objects = kinds(render("cpu", "prefill.tp=2"), "StatefulSet")
    args = {name: workload["spec"]["template"]["spec"]["containers"][0]["args"] for name, workload in objects.items()}
    assert "--tp=2" in args["baton-prefill"]
    assert not [argument for argument in args["baton-decode"] if argument.startswith("--tp")]


def test_ports_named_by_services_and_monitors_are_ports_of_the_pods():
    for name in VALUES:
        objects = render(name)
        for workload, template in pod_templates(objects):
            ports = [p for c in template["spec"]["containers"] for p in c.get("ports", [])]
            assert len({p["name"] for p in ports}) == len(ports) == len({p["containerPort"] for p in ports}), (name, workload)
        for service in kinds(objects, "Service").values():
            selected = [t for _, t in pod_templates(objects) if service["spec"]["selector"].items() <= t["metadata"]["labels"].items()]
            for port in service["spec"]["ports"]:
                assert any(p["name"] == port["targetPort"] for t in selected for c in t["spec"]["containers"] for p in c["ports"]), (name, port)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
