"""Check of YAML documents against their schemas; runs in the environments of `make tools`.

Each line of stdin is a text with documents, as a string in JSON. The answer is a line of JSON: the
documents, and their errors. One process checks many texts, because its imports take seconds. Kubernetes documents are compared with its OpenAPI
schemas, which the package contains; KEDA's and Prometheus operator's with models made from their
definitions; KServe's, with the argument `kserve`, with those of its SDK. A model ignores unknown
fields, so they are found by converting the model back into a document.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import yaml

# The oldest version that enables everything that the manifests use.
KUBERNETES = "1.33"
MODELS = {
    "keda.sh": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com": "cloudcoil.models.prometheus_operator.v1",
}


def lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Return what a document has, and the converted one lacks."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}: no such field"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def errors_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Return the errors of a document of Kubernetes, KEDA or Prometheus operator."""
    group = document["apiVersion"].partition("/")[0]
    if group in MODELS:
        from pydantic import ValidationError

        # Imported here, because it takes seconds.
        models = import_module(MODELS[group])
        try:
            model = getattr(models, document["kind"]).model_validate(document)
        except ValidationError as error:
            yield str(error)
        else:
            yield from lost(
                document, model.model_dump(mode="json", by_alias=True, exclude_unset=True), document["kind"]
            )
        return
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{document['kind']}: {'.'.join(map(str, error.path))}: {error.message}"


def errors_of_kserve(document: Mapping[str, Any]) -> Iterator[str]:
    """Return the errors of a document of KServe."""
    version = document["apiVersion"].partition("/")[2]
    yield from _errors(document, f"{version[0].upper()}{version[1:]}{document['kind']}", document["kind"])


def _errors(value: Any, kind: str, path: str) -> Iterator[str]:
    """Return the errors of a value of this kind, as KServe's SDK names kinds."""
    import kserve.models
    import kubernetes.client.models

    inner = re.fullmatch(r"(list\[|dict\(str, )(.+)[\])]", kind)
    if inner is not None:
        if not isinstance(value, list if inner[1] == "list[" else dict):
            yield f"{path}: {value!r} is no {kind}"
            return
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            yield from _errors(each, inner[2], f"{path}[{key}]")
    elif hasattr(kserve.models, kind):
        model = getattr(kserve.models, kind)
        attributes = {key: attribute for attribute, key in model.attribute_map.items()}
        for key, each in value.items():
            if key not in attributes:
                yield f"{path}.{key}: no such field"
            else:
                yield from _errors(each, model.openapi_types[attributes[key]], f"{path}.{key}")
        try:
            # Raises for a missing required field.
            model(**{attributes[key]: each for key, each in value.items() if key in attributes})
        except ValueError as error:
            yield f"{path}: {error}"
    elif hasattr(kubernetes.client.models, kind):
        model = getattr(kubernetes.client.models, kind)
        try:
            kept = model.from_dict(value).model_dump(mode="json", by_alias=True, exclude_unset=True)
        except ValueError as error:
            yield f"{path}: {error}"
        else:
            yield from lost(value, kept, path)
    elif kind in ("str", "bool", "int") and type(value).__name__ != kind:
        yield f"{path}: {value!r} is no {kind}"


def main() -> None:
    check = errors_of_kserve if sys.argv[1:] == ["kserve"] else errors_of
    for line in sys.stdin:
        documents = [document for document in yaml.safe_load_all(json.loads(line)) if document is not None]
        errors = [error for document in documents for error in check(document)]
        print(json.dumps({"documents": documents, "errors": errors}), flush=True)


if __name__ == "__main__":
    main()
