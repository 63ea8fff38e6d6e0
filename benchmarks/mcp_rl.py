"""`ludus mcp-rl` on public MCP servers, with a scripted writer and judge: what the pipeline itself does.

    python benchmarks/mcp_rl.py time       --server mcp-server-time
    python benchmarks/mcp_rl.py everything --server "npx -y @modelcontextprotocol/server-everything"

A language model would write other scenarios and judge by reading. Here both are rules behind a real
OpenAI-compatible address, so that a small machine can run it and the judge's mistakes are none. The judge sees
what RULER shows it, and nothing else. Model: made from scratch, 2 layers. Prints the report's table.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ZONES = ["Europe/Paris", "Asia/Tokyo", "America/New_York", "Africa/Cairo", "Asia/Dubai", "Europe/London"]
WORDS = ["apple", "river", "stone", "cloud", "tiger", "piano"]


def time_scenarios(draw: random.Random) -> dict[str, Any]:
    source, target = draw.sample(ZONES, 2)
    clock = f"{draw.randrange(24):02d}:00"
    arguments = {"source_timezone": source, "time": clock, "target_timezone": target}
    task = f"It is {clock} in {source}. Which time is it in {target}?"
    return {"task": task, "difficulty": 1, "plan": [{"tool": "convert_time", "arguments": arguments}]}


def everything_scenarios(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        a, b = draw.randrange(1, 30), draw.randrange(1, 30)
        plan = [{"tool": "get-sum", "arguments": {"a": a, "b": b}}]
        return {"task": f"What is the sum of {a} and {b}?", "difficulty": 1, "plan": plan}
    words = f"{draw.choice(WORDS)} {draw.choice(WORDS)} {draw.choice(WORDS)}"
    plan = [{"tool": "echo", "arguments": {"message": words}}]
    return {"task": f"Have the words {words} echoed.", "difficulty": 1, "plan": plan}


KINDS = {
    "time": (time_scenarios, ["convert_time"]),
    "everything": (everything_scenarios, ["get-sum", "echo"]),
}


class Script:
    """The writer and the judge."""

    def __init__(self, kind: str) -> None:
        self.make, self.draw = KINDS[kind][0], random.Random(7)
        self.plans: dict[str, list[dict[str, Any]]] = {}
        self.asked = 0

    def answer(self, messages: list[dict[str, Any]]) -> str:
        self.asked += 1
        text = messages[-1]["content"]
        if text.startswith("Write "):
            made = [self.make(self.draw) for _ in range(8)]
            self.plans |= {one["task"]: one["plan"] for one in made}
            return json.dumps({"scenarios": made})
        if text.startswith("A task for an AI agent: "):
            return json.dumps({"done": True, "answer": result_of(text)})
        return self.verdict(text)

    def verdict(self, text: str) -> str:
        code = re.findall(r'"code": "([0-9a-f]+)"', text)[-1]
        plan = next((plan for task, plan in self.plans.items() if task in text), [])
        attempts = re.findall(rf"<attempt-(\d+)-{code}>\n(.*?)\n</attempt-\1-{code}>", text, re.S)
        scores = [{"id": int(number), "score": self.score(plan, body)} for number, body in attempts]
        return json.dumps({"code": code, "scores": scores})

    def score(self, plan: list[dict[str, Any]], body: str) -> float:
        """0.7 for the planned calls, 0.3 for an answer with the result; 0.1 off for each call too many."""
        calls = re.findall(r"\[calls (\S+) (.*)\]", body)
        wanted = [
            f"[calls {one['tool']} {json.dumps(one['arguments'], ensure_ascii=False)}]" for one in plan
        ]
        made = sum(one in body for one in wanted) / max(1, len(wanted))
        last = body.rpartition("[ASSISTANT]")[2]
        is_told = made == 1 and "[calls" not in last and result_of(body) in last
        waste = 0.1 * max(0, len(calls) - len(wanted))
        return max(0.0, 0.2 * bool(calls) + 0.5 * made + 0.3 * is_told - waste)


def result_of(text: str) -> str:
    """What the results amount to: the last clock time, the last sum, or what was echoed."""
    found = re.findall(r"T(\d\d:\d\d):\d\d|The sum of \S+ and \S+ is (\d+)|Echo: (.+)", text)
    return next((part for part in reversed(found[-1]) if part), "") if found else "nothing"


def serve(script: Script) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": script.answer(body["messages"])}
            told = {"choices": [{"message": message, "finish_reason": "stop"}]}
            data = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1#script"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--server", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenarios", type=int, default=96)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--imitate", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    script = Script(given.kind)
    address = serve(script)
    command = [
        sys.executable,
        "-m",
        "ludus",
        "mcp-rl",
        given.server,
        "--model",
        "scratch",
        "--writer",
        address,
    ]
    command += ["--scenarios", str(given.scenarios), "--held-out", str(given.held_out)]
    command += ["--imitate", str(given.imitate), "--seed", str(given.seed), "--out", str(given.out)]
    for tool in KINDS[given.kind][1]:
        command += ["--allow", tool]
    started = time.time()
    subprocess.run([*command, *given.overrides], check=True)
    print(f"{time.time() - started:.0f} seconds, {script.asked} questions")


if __name__ == "__main__":
    main()
