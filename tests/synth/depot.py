"""A page of text, and what language models make of it: a good environment, and broken ones."""

from __future__ import annotations

import json

PAGE = """The depot. Parcels arrive at the depot and leave it on the same day. Nobody knows what is in them
until
they have been weighed. A heavy parcel leaves by truck, a light one by bike. A parcel that was sent by the wrong
vehicle comes back, and the customer complains. Each order names one parcel that has to leave."""

SPEC = json.dumps(
    {
        "name": "depot",
        "description": "Parcels are weighed and sent by the right vehicle.",
        "tools": [
            {
                "name": "weigh",
                "description": "Weigh a parcel.",
                "parameters": [{"name": "parcel", "description": "Which parcel."}],
            },
            {
                "name": "send",
                "description": "Send a parcel.",
                "parameters": [
                    {"name": "parcel", "description": "Which parcel."},
                    {"name": "by", "description": "The vehicle.", "choices": ["truck", "bike"]},
                ],
            },
        ],
    }
)

RULES = """
import random

def reset(seed):
    draw = random.Random(seed)
    names = [f"{letter}{number}" for letter in "ABCDEF" for number in range(1, 9)]
    return {"parcels": {name: draw.choice(["heavy", "light"]) for name in draw.sample(names, 4)}, "sent": {}}

def task(state, seed):
    name = random.Random(seed + 1000).choice(sorted(state["parcels"]))
    return {"prompt": f"Send parcel {name}.", "goal": {"parcel": name}}

def weigh(state, parcel):
    if parcel not in state["parcels"]:
        raise ValueError("there is no such parcel")
    return state["parcels"][parcel]

def send(state, parcel, by):
    if parcel not in state["parcels"]:
        raise ValueError("there is no such parcel")
    if parcel in state["sent"]:
        raise ValueError("it has left already")
    state["sent"][parcel] = by
    return "it has left"

def check(state, goal, answer):
    name = goal["parcel"]
    right = "truck" if state["parcels"][name] == "heavy" else "bike"
    return state["sent"].get(name) == right

def solve(state, goal):
    name = goal["parcel"]
    right = "truck" if state["parcels"][name] == "heavy" else "bike"
    return [{"tool": "weigh", "arguments": {"parcel": name}},
            {"tool": "send", "arguments": {"parcel": name, "by": right}}]
"""


def fenced(rules: str) -> str:
    return f"Here is the module.\n```python\n{rules}\n```\nIt is finished."


def changed(old: str, new: str) -> str:
    assert old in RULES
    return RULES.replace(old, new)


BROKEN = {
    "syntax": RULES + "\ndef broken(:\n",
    "missing": changed("def send(", "def dispatch("),
    "endless": changed('    state["sent"][parcel] = by\n', "    while True: pass\n"),
    "endless import": "while True: pass\n" + RULES,
    "passes everything": changed('    return state["sent"].get(name) == right', "    return True"),
    "passes any sending": changed(
        '    return state["sent"].get(name) == right', '    return bool(state["sent"])'
    ),
    "unsolvable": changed(".get(name) == right", '.get(name) == "balloon"'),
    "nondeterministic": changed("draw = random.Random(seed)", "draw = random.Random()"),
    "raises": changed('    return state["parcels"][parcel]\n', "    return parcels[parcel]\n"),
    "one task": changed("draw = random.Random(seed)", "draw = random.Random(0)").replace(
        "random.Random(seed + 1000)", "random.Random(0)"
    ),
    "ends its process": changed("import random\n", "import random, os\nos._exit(0)\n"),
}
"""Rules that a language model might write, by what is wrong with them."""
KINDS = {
    "syntax": "syntax", "missing": "missing", "endless": "rules", "endless import": "rules",
    "passes everything": "verifier", "passes any sending": "verifier", "unsolvable": "unsolvable",
    "nondeterministic": "nondeterministic", "raises": "rules", "one task": "alike",
    "ends its process": "rules",
}  # fmt: skip
