"""People's labels of episodes, stored as training data in a folder of their own.

    labels.jsonl        every label: {"prompt", "completion", "label": true | false, "score", "note", ...}
                        (KTO and reward models read it)
    good.jsonl          the good ones {"prompt", "completion"}: SFT imitates them
    preferences.jsonl   {"prompt", "chosen", "rejected"}: DPO, IPO, SimPO and reward models read it

An episode has one label, and two episodes one preference: saying it again replaces what was said. Files are
written whole, so that a trainer that reads them at the same time sees one state or the other.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.messages import Json, Message
from ludus.core.trajectory import Trajectory
from ludus.observe import atomic_write, read_regular

_MOST_LABELS = 100_000
_MOST_NOTE = 4_000


class LabelError(LudusError):
    """A label that cannot be kept."""


class LabelStore:
    """The labels of a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def labels(self) -> list[Json]:
        return [_short(row) for row in self._rows("labels.jsonl")]

    def preferences(self) -> list[Json]:
        return [_short(row) for row in self._rows("preferences.jsonl")]

    def label(
        self,
        episode: Json,
        trajectory: Trajectory,
        label: bool | None,
        *,
        score: float | None = None,
        note: str = "",
    ) -> Json:
        """Say that an episode is good or bad; None takes it back."""
        if not isinstance(label, bool | None):
            raise LabelError(f"a label is true, false or null, not {label!r:.40}")
        key = _key(episode)
        with self._lock:
            rows = [row for row in self._rows("labels.jsonl") if _key(row.get("episode") or {}) != key]
            if label is not None:
                prompt, completion = split_messages(trajectory)
                rows.append(
                    {
                        "prompt": prompt,
                        "completion": completion,
                        "label": label,
                        "score": score,
                        "note": note[:_MOST_NOTE],
                        "episode": episode,
                        "task": trajectory.task.id,
                        "reward": trajectory.reward,
                        "time": round(time.time(), 3),
                    }
                )
            self._write("labels.jsonl", rows)
            good = [row for row in rows if row.get("label") is True]
            self._write(
                "good.jsonl",
                [{name: row[name] for name in ("prompt", "completion", "episode")} for row in good],
            )
        return {"labels": len(rows), "good": len(good)}

    def prefer(
        self, chosen: tuple[Json, Trajectory], rejected: tuple[Json, Trajectory], note: str = ""
    ) -> Json:
        """Say that one of two attempts at the same task is better."""
        (good, good_played), (bad, bad_played) = chosen, rejected
        prompt, answer = split_messages(good_played)
        other_prompt, other_answer = split_messages(bad_played)
        if prompt != other_prompt:
            raise LabelError(
                "the two episodes begin with different prompts: a preference is between answers to one question"
            )
        if answer == other_answer:
            raise LabelError("both episodes say the same: there is nothing to prefer")
        pair = {_key(good), _key(bad)}
        with self._lock:
            rows = [
                row
                for row in self._rows("preferences.jsonl")
                if {_key(row.get("chosen_episode") or {}), _key(row.get("rejected_episode") or {})}
                != pair
            ]
            rows.append(
                {
                    "prompt": prompt,
                    "chosen": answer,
                    "rejected": other_answer,
                    "note": note[:_MOST_NOTE],
                    "chosen_episode": good,
                    "rejected_episode": bad,
                    "task": good_played.task.id,
                    "time": round(time.time(), 3),
                }
            )
            self._write("preferences.jsonl", rows)
        return {"preferences": len(rows)}

    def _rows(self, name: str) -> list[Json]:
        try:
            lines = read_regular(self.folder / name).split(b"\n")
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line) if line else None
            except ValueError:
                raise LabelError(
                    f"{self.folder / name} is damaged: a line is not JSON; mend or move it"
                ) from None
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def _write(self, name: str, rows: Sequence[Json]) -> None:
        if len(rows) > _MOST_LABELS:
            raise LabelError(f"{self.folder / name} holds {_MOST_LABELS} rows; move it away first")
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        atomic_write(self.folder / name, text)


def split_messages(trajectory: Trajectory) -> tuple[list[Json], list[Json]]:
    """(prompt, completion) as chat messages; the completion begins with the model's first message."""
    asked = trajectory.asked
    said = trajectory.messages[len(asked) :]
    if not asked or not said:
        raise LabelError("the model said nothing in this episode, so there is nothing to learn from it")
    return [_chat(one) for one in asked], [_chat(one) for one in said]


def _chat(message: Message) -> Json:
    chat = message.as_chat()
    if any(call.fault is not None for call in message.tool_calls):
        chat.pop("tool_calls", None)  # what could not be read as a call is in the text alone
    return chat


def _key(episode: Any) -> tuple[str, str, int]:
    if not isinstance(episode, dict):
        return "", "", -1
    return str(episode.get("run")), str(episode.get("file")), int(episode.get("row", -1))


def _short(row: Json) -> Json:
    return {
        name: value
        for name, value in row.items()
        if name not in ("prompt", "completion", "chosen", "rejected")
    }
