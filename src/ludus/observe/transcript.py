"""An episode as people read it. For reading alone: what the model read and wrote is in the tokens."""

from __future__ import annotations

import json
from collections import Counter

from ludus.core.messages import Message, ToolCall
from ludus.core.trajectory import Trajectory
from ludus.observe.encoding import dump_value
from ludus.observe.logs import printable


def episode_text(trajectory: Trajectory, *, max_chars: int = 6000, max_message_chars: int = 1200) -> str:
    """The conversation, the calls, the rewards and the ending, in about `max_chars` characters."""
    task = _one_line(trajectory.task.id or "(no id)", 200)
    head = printable(f"=== task {task}, attempt {trajectory.attempt} ===")
    messages = trajectory.messages or list(trajectory.task.messages)
    body = "\n".join(printable(_message_text(message, max_message_chars)) for message in messages)
    foot = "\n".join(f"--- {printable(line)}" for line in _ending(trajectory))
    room = max(0, max_chars - len(head) - len(foot))
    return "\n".join([head, shortened(body, room), foot])


def shortened(text: str, limit: int, gap: str = "\n") -> str:
    """The head and the tail of a text, and how much is missing between them."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}{gap}[... {left_out} characters left out ...]{gap}{text[len(text) - tail :]}"


def _one_line(text: str, limit: int) -> str:
    """The same in one line, so that nothing in it can pass for a line of ours."""
    return shortened(text.replace("\n", "\\n"), limit, gap=" ")


def _message_text(message: Message, limit: int) -> str:
    speaker = f"{message.role} {message.name}" if message.name else message.role
    lines = [f"[{_one_line(speaker, 100)}]"]
    if message.content:
        lines.append(shortened(message.content, limit))
    lines += [_one_line(_call_text(call), limit) for call in message.tool_calls]
    lines += [f"<{item.kind} {item.sha256[:12]}>" for item in message.media]
    return "\n".join(lines)


def _call_text(call: ToolCall) -> str:
    arguments = ", ".join(f"{name}={_compact(value)}" for name, value in call.arguments.items())
    fault = f"   ! {call.fault.value}: {call.problem}" if call.fault is not None else ""
    return f"-> {call.name}({arguments}){fault}"


def _compact(value: object) -> str:
    return dump_value(value)[0] if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ending(trajectory: Trajectory) -> list[str]:
    tokens = sum(len(action.tokens) for action in trajectory.actions)
    calls = len(trajectory.calls)
    lines = [
        f"{trajectory.stop.value} after {trajectory.turns} turns, {calls} calls, {tokens} tokens said"
    ]
    if trajectory.answer is not None:
        lines.append(f"answer: {_one_line(trajectory.answer, 300)}")
    if faults := Counter(fault.value for fault in trajectory.faults):
        lines.append("faults: " + ", ".join(f"{name} × {count}" for name, count in faults.items()))
    turn_rewards = [(n, a.reward) for n, a in enumerate(trajectory.actions, 1) if a.reward is not None]
    if turn_rewards:
        lines.append(
            "turn rewards: " + ", ".join(f"turn {n}: {value:g}" for n, value in turn_rewards[:20])
        )
    if trajectory.failure is not None:
        failure = trajectory.failure
        what = _one_line(f"{failure.kind}: {failure.message}", 300)
        lines.append(f"failed at {failure.boundary.value} after {failure.attempts} tries: {what}")
    parts = ", ".join(f"{name} {value:g}" for name, value in list(trajectory.rewards.items())[:20])
    total = "not scored" if trajectory.reward is None else f"{trajectory.reward:g}"
    lines.append(f"reward: {total}" + (f" ({_one_line(parts, 600)})" if parts else ""))
    return lines
