"""An agent that knows nothing of Ludus: an ordinary program on OpenAI's client, which assigns a support ticket.

`ludus train ticket_agent` trains the model behind it, at the address in its environment. By hand:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python ticket_agent.py "Charged twice, says a baker."
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

TEAMS = ("billing", "access", "network", "mail")
ASSIGN = {
    "type": "function",
    "function": {
        "name": "assign",
        "description": "Assign the ticket to a team.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "enum": list(TEAMS)}},
            "required": ["to"],
        },
    },
}


def assign_ticket(client: OpenAI, ticket: str) -> str | None:
    """The team that the model chooses."""
    reply = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": ticket}], tools=[ASSIGN]
    )
    for call in reply.choices[0].message.tool_calls or ():
        return json.loads(call.function.arguments).get("to")
    return None


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else json.load(sys.stdin)["messages"][-1]["content"]
    print(assign_ticket(OpenAI(), given))


if __name__ == "__main__":
    main()
