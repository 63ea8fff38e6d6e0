"""An MCP server over stdio in plain Python, which starts at once and misbehaves as it is told to.

Independent of the SDK: what it says is what stands here. Options are words on its command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

OPTIONS = dict(word.partition("=")[::2] for word in sys.argv[1:])
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
NUMBER = {"type": "integer"}
TEXT = {"type": "string"}
lock = threading.Lock()
count = 0


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "description": "Add two numbers.",
        "inputSchema": schema(a=NUMBER, b=NUMBER),
        "outputSchema": schema(sum=NUMBER),
        "annotations": {"readOnlyHint": True},
    },
    "echo": {"description": "Say it again.", "inputSchema": schema(text=TEXT)},
    "count": {"description": "Count the calls.", "inputSchema": schema()},
    "refuse": {"description": "Refuse.", "inputSchema": schema()},
    "rpc_error": {"description": "Answer with an error.", "inputSchema": schema(code=NUMBER)},
    "image": {"description": "An image and a link.", "inputSchema": schema()},
    "huge": {
        "description": "Much text.",
        "inputSchema": schema(size=NUMBER, id_last={"type": "boolean"}),
    },
    "lie": {
        "description": "Not what it says.",
        "inputSchema": schema(),
        "outputSchema": schema(sum=NUMBER),
    },
    "die": {"description": "Exit.", "inputSchema": schema()},
    "die_once": {
        "description": "Exit the first time.",
        "inputSchema": schema(marker=TEXT),
        "annotations": {"readOnlyHint": True},
    },
    "hang": {"description": "Never answer anything again.", "inputSchema": schema()},
    "slow": {"description": "Answer late.", "inputSchema": schema()},
    "stray": {"description": "Print garbage, then answer.", "inputSchema": schema()},
    "nonsense": {"description": "An answer that is no MCP.", "inputSchema": schema()},
    "null": {"description": "Answer with null.", "inputSchema": schema()},
    "unlock": {"description": "Bring a new tool, and lose another.", "inputSchema": schema()},
    "files": {"description": "Write a file, list all.", "inputSchema": schema(name=TEXT)},
    "needs.a/name": {"description": "A name that formats cannot write.", "inputSchema": schema()},
}


def send(message: dict[str, Any], *, id_last: bool = False) -> None:
    first = {} if id_last else {"jsonrpc": "2.0"}
    last = {"jsonrpc": "2.0"} if id_last else {}
    if id_last and "id" in message:
        last["id"] = message.pop("id")
    with lock:
        sys.stdout.write(json.dumps({**first, **message, **last}) + "\n")
        sys.stdout.flush()


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": content}], **more}


def listed() -> list[dict[str, Any]]:
    if "many" in OPTIONS:
        return [{"name": f"tool_{n}", "inputSchema": schema()} for n in range(int(OPTIONS["many"]))]
    if "schemas" in OPTIONS:
        good = {"name": "good", "inputSchema": schema()}
        bad = [{"type": "string"}] if OPTIONS["schemas"] == "wrong" else []
        large = {"type": "object", "description": "x" * 60_000}
        odd = [{"name": f"bad_{n}", "inputSchema": one} for n, one in enumerate([*bad, large])]
        return [good, *odd, {**good, "description": "a second of that name"}]
    return [{"name": name, **about} for name, about in TOOLS.items()]


def call(name: str, given: dict[str, Any]) -> dict[str, Any] | None:
    global count
    count += 1
    if name == "add":
        total = given["a"] + given["b"]
        return {"content": [], "structuredContent": {"sum": total}}
    if name == "echo":
        return text(given["text"])
    if name == "count":
        return text(str(count))
    if name == "refuse":
        return text("not today", isError=True)
    if name == "image":
        link = {
            "type": "resource_link",
            "name": "notes",
            "uri": "file:///notes.txt",
            "mimeType": "text/plain",
        }
        image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
        broken = {"type": "image", "data": "*no base64*", "mimeType": "image/png"}
        return {"content": [{"type": "text", "text": "look"}, image, link, broken]}
    if name == "lie":
        return {"content": [{"type": "text", "text": "a lie"}], "structuredContent": {"sum": "many"}}
    if name == "die":
        sys.stderr.write("I cannot go on\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "die_once":
        marker = Path(given["marker"])
        if not marker.exists():
            marker.touch()
            os._exit(4)
        return text("alive")
    if name == "hang":
        with lock:
            time.sleep(3600)
    if name == "stray":
        sys.stdout.write("a banner\n{\n\x00\xff not json\n")
        return text("answered")
    if name == "nonsense":
        return {"content": "no list"}
    if name == "unlock":
        TOOLS.pop("refuse", None)
        TOOLS["secret"] = {"description": "New here.", "inputSchema": schema(word=TEXT)}
        send({"method": "notifications/tools/list_changed"})
        return text("unlocked")
    if name == "secret":
        return text(f"the secret of {given['word']}")
    if name == "files":
        Path(given["name"]).write_text("x")
        return text(" ".join(sorted(entry.name for entry in Path().iterdir())))
    return text(f"{name} was called")


def answer(request: dict[str, Any]) -> None:
    method, params, id = request["method"], request.get("params") or {}, request["id"]
    if method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        info = {"name": "scripted", "version": "1"}
        version = params["protocolVersion"]
        send(
            {
                "id": id,
                "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info},
            }
        )
    elif method == "ping":
        send({"id": id, "result": {}})
    elif method == "tools/list":
        result: dict[str, Any] = {"tools": listed()}
        if "endless" in OPTIONS:
            result = {"tools": [], "nextCursor": "again"}
        send({"id": id, "result": result})
    elif method == "tools/call":
        name, given = params["name"], params.get("arguments") or {}
        if name == "rpc_error":
            send({"id": id, "error": {"code": given["code"], "message": "no such thing"}})
        elif name == "null":
            send({"id": id, "result": None})
        elif name == "slow":
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        elif name == "huge":
            send({"id": id, "result": text("x" * given["size"])}, id_last=given["id_last"])
        else:
            found = call(name, given)
            if found is not None:
                send({"id": id, "result": found})
    else:
        send({"id": id, "error": {"code": -32601, "message": f"no method {method}"}})


def main() -> None:
    if "pid" in OPTIONS:
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        Path(OPTIONS["pid"]).write_text(f"{os.getpid()} {child.pid}")
    if "banner" in OPTIONS:
        print("Welcome to the server!", flush=True)
    if "exits" in OPTIONS:
        sys.exit("the settings are wrong")
    if "silent" in OPTIONS:
        time.sleep(3600)
    if "starts" in OPTIONS:  # the first so many starts fail
        marks = Path(OPTIONS["starts"])
        marks.write_text(marks.read_text() + "x" if marks.exists() else "x")
        if len(marks.read_text()) < int(OPTIONS["from"]):
            sys.exit("not yet")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            answer(message)


main()
