"""The documentation page, made of the OpenAPI document, with no scripts and nothing external."""

from __future__ import annotations

import json
from html import escape

from ludus.core.messages import Json

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code,pre{font:13px/1.4 ui-monospace,monospace;background:#f5f5f2;border-radius:4px}"
    "code{padding:.1rem .3rem}pre{padding:.8rem;overflow:auto}details{margin:.3rem 0}"
    "h2{margin-top:2rem;border-bottom:1px solid #ddd}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
)


def page(document: Json) -> str:
    """HTML for people."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p>The machine-readable form is <a href=/openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(path, method, operation)
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        text = escape(json.dumps(schema, indent=2))
        parts.append(
            f"<details id=schema-{name}><summary><code>{name}</code></summary><pre>{text}</pre>"
        )
        parts.append("</details>")
    return "\n".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: Json) -> list[str]:
    parts = [
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>",
        "<table>",
    ]
    for parameter in operation["parameters"]:
        kind = f"{parameter['in']}, {parameter['schema']['type']}"
        parts.append(f"<tr><td><code>{escape(parameter['name'])}</code><td>{escape(kind)}")
    if "requestBody" in operation:
        schemas = [content["schema"] for content in operation["requestBody"]["content"].values()]
        parts.append(f"<tr><td>body<td>{_link(schemas[0])}")
    for status, answer in sorted(operation["responses"].items()):
        kinds = ", ".join(
            f"{escape(kind)} {_link(content['schema'])}" for kind, content in answer["content"].items()
        )
        parts.append(f"<tr><td><code>{status}</code><td>{escape(answer['description'])}<td>{kinds}")
    return [*parts, "</table>"]


def _link(schema: Json) -> str:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return f"<a href=#schema-{name}><code>{name}</code></a>" if name else ""
