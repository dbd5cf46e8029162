"""Checks custom resources against the schemas in their CRDs, strictly: fields the schema does not know are errors."""
import functools

import jsonschema
import yaml


class Invalid(Exception):
    pass


@functools.lru_cache(maxsize=None)
def load(directory):
    """{(apiVersion, kind): JSON schema} of all CRDs in a folder."""
    schemas = {}
    for path in sorted(directory.glob("*.yaml")):
        for doc in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            if not doc or doc.get("kind") != "CustomResourceDefinition":
                continue
            for version in doc["spec"]["versions"]:
                key = (f"{doc['spec']['group']}/{version['name']}", doc["spec"]["names"]["kind"])
                schemas[key] = strict(version["schema"]["openAPIV3Schema"], top=True)
    assert schemas, f"no CRDs in {directory}: make tools"
    return schemas


def strict(node, top=False):
    """OpenAPI's dialect as JSON schema, closed where Kubernetes would drop unknown fields."""
    if not isinstance(node, dict):
        return node
    out = {key: value for key, value in node.items() if not key.startswith("x-") and key not in ("nullable", "default", "example", "format", "description")}
    for key in ("properties",):
        if key in out:
            out[key] = {name: strict(value) for name, value in out[key].items()}
    for key in ("items", "additionalProperties", "not"):
        if key in out:
            out[key] = strict(out[key])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in out:
            out[key] = [strict(value) for value in out[key]]
    if top:
        # The CRD leaves what every object has to Kubernetes.
        out["properties"] = {**out["properties"], "metadata": {"type": "object"}, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    closed = out.get("type") == "object" and "properties" in out and "additionalProperties" not in out
    if closed and not node.get("x-kubernetes-preserve-unknown-fields"):
        out["additionalProperties"] = False
    if node.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if node.get("nullable") and "type" in out:
        out["type"] = [*([out["type"]] if isinstance(out["type"], str) else out["type"]), "null"]
    return out


def validate(doc, schema):
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(doc), key=lambda e: list(e.path))
    if errors:
        where = "/".join(map(str, errors[0].path))
        raise Invalid(f"{doc['kind']} {doc['metadata']['name']}: {where}: {errors[0].message[:400]}")
