"""One episode for a page: as JSON, and as a self-contained HTML file.

In JSON what a model or a tool wrote goes out as it is: the page shows it as text and never as markup. Long
texts are cut and can be asked for. A file has no script, loads nothing, and everything that was said is
escaped.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json, Message, ToolCall
from ludus.core.tokenizer import Tokenizer
from ludus.core.trajectory import Segment, SegmentKind, Trajectory
from ludus.observe import dump_value, episode_text, printable
from ludus.observe.episode_rows import trajectory_of
from ludus.observe.episodes import MediaStore
from ludus.viewer.episode_index import EpisodeIndex
from ludus.viewer.workspace import NotFound, Workspace, plain

_log = logging.getLogger(__name__)

MOST_CHARS = 12_000
"""Characters of one message that are sent at first."""
TEXT_PIECE = 200_000
"""Characters of a message that one further request gets."""
MOST_TOKENS = 4_000
"""Tokens that one request gets."""
_MOST_MESSAGES = 600
_MOST_ARGUMENTS = 8_000
_TOKENIZERS_KEPT = 4

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MOST_PICTURE_BYTES = 1_000_000
STATIC = Path(__file__).parent / "static"


class EpisodeReader:
    """Reads episodes by (run, file, row)."""

    def __init__(self, workspace: Workspace, index: EpisodeIndex) -> None:
        self._workspace, self._index = workspace, index
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._loading = threading.Lock()

    def trajectory(self, run: str, file: str, row: int) -> tuple[Json, Trajectory]:
        stored, before = self._index.stored_row(run, file, row)
        known: dict[int, Trajectory] = {}
        try:
            for one in before:
                known[one["attempt"]] = trajectory_of(one, known.get(one["branch_attempt"]))
            return stored, trajectory_of(stored, known.get(stored.get("branch_attempt") or 0))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise NotFound(f"episode {row} of {file} cannot be read: {str(error)[:300]}") from None

    def view(self, run: str, file: str, row: int) -> Json:
        stored, trajectory = self.trajectory(run, file, row)
        media = MediaStore(self._workspace.run(run).media_path)
        group = self._index.group(run, file, stored["group_id"])
        return {
            "run": run,
            "file": file,
            "row": row,
            "step": stored["step"],
            "split": stored["split"],
            "group": stored["group_id"],
            **episode_json(trajectory, media),
            "attempts": group,
        }

    def message_text(self, run: str, file: str, row: int, message: int, offset: int) -> Json:
        """A piece of a message that was too long to be sent at once."""
        _, trajectory = self.trajectory(run, file, row)
        messages = shown_messages(trajectory)
        if not 0 <= message < len(messages):
            raise NotFound(f"the episode has no message {message}")
        content = messages[message].content
        piece = content[offset : offset + TEXT_PIECE]
        return {"text": _safe(piece), "offset": offset, "chars": len(content)}

    def transcript(self, run: str, file: str, row: int) -> str:
        """The episode as `ludus show` prints it."""
        return episode_text(
            self.trajectory(run, file, row)[1], max_chars=200_000, max_message_chars=20_000
        )

    def tokens(self, run: str, file: str, row: int, sequence: int, offset: int) -> Json:
        """The tokens of one sequence, from `offset` on, with all that is known of each."""
        _, trajectory = self.trajectory(run, file, row)
        if not 0 <= sequence < len(trajectory.sequences):
            raise NotFound(f"the episode has no sequence {sequence}")
        chosen = trajectory.sequences[sequence]
        tokenizer = self.tokenizer(run)
        parts: list[Json] = []
        place = turn = 0
        left = MOST_TOKENS
        for number, segment in enumerate(chosen.segments):
            start, stop = max(0, offset - place), min(len(segment.tokens), offset - place + MOST_TOKENS)
            if start < stop and left > 0:
                stop = min(stop, start + left)
                left -= stop - start
                parts.append(
                    _segment_json(segment, number, start, stop, tokenizer)
                    | {"turn": turn if segment.kind is SegmentKind.ACTION else None}
                )
            place += len(segment.tokens)
            turn += segment.kind is SegmentKind.ACTION
        return {
            "sequence": sequence,
            "sequences": [_thread(trajectory, n) for n in range(len(trajectory.sequences))],
            "offset": offset,
            "tokens": place,
            "decoded": tokenizer is not None,
            "shared": trajectory.branch.segments if trajectory.branch and sequence == 0 else 0,
            "segments": parts,
        }

    def tokenizer(self, run: str) -> Tokenizer | None:
        """The tokenizer of the run's newest checkpoint; None where there is none, or none that can be read."""
        with self._loading:
            if self._tokenizers.get(run) is None:
                while len(self._tokenizers) >= _TOKENIZERS_KEPT:
                    self._tokenizers.pop(next(iter(self._tokenizers)))
                self._tokenizers[run] = self._load(run)
            return self._tokenizers[run]

    def _load(self, run: str) -> Tokenizer | None:
        from ludus.chat.tokenizers import load_tokenizer

        try:
            checkpoint = self._workspace.run(run).latest_checkpoint()
            if checkpoint is None:
                return None
            if odd := [
                one.name for one in checkpoint.path.iterdir() if not (one.is_file() or one.is_dir())
            ]:
                raise ConfigError(f"{checkpoint.path / odd[0]} is no regular file")
            return load_tokenizer(checkpoint.path)
        except (LudusError, OSError, ValueError, KeyError) as error:
            _log.warning("no tokenizer of %s: %s", run, error)
            return None


def episode_json(trajectory: Trajectory, media: MediaStore | None) -> Json:
    """An episode for its page, without the tokens."""
    task, failure, branch = trajectory.task, trajectory.failure, trajectory.branch
    messages = shown_messages(trajectory)
    return {
        "task": {
            "id": _safe(task.id[:2000]),
            "target": _cut(dump_value(task.target)[0]),
            "metadata": _cut(dump_value(task.metadata)[0]),
            "envs": _cut(dump_value(task.envs)[0]),
        },
        "attempt": trajectory.attempt,
        "seed": str(trajectory.seed),
        "stop": trajectory.stop.value,
        "failure": None
        if failure is None
        else {
            "boundary": failure.boundary.value,
            "kind": _safe(failure.kind),
            "message": _safe(failure.message[:MOST_CHARS]),
            "attempts": failure.attempts,
        },
        "reward": plain(trajectory.reward),
        "rewards": [[_safe(name), plain(value)] for name, value in trajectory.rewards.items()],
        "answer": None if trajectory.answer is None else _safe(trajectory.answer[:MOST_CHARS]),
        "seconds": plain(trajectory.seconds),
        "counts": plain(trajectory.counts),
        "messages": [
            _message_json(one, n, turn, media)
            for n, (one, turn) in enumerate(_with_turns(trajectory, messages[:_MOST_MESSAGES]))
        ],
        "more_messages": max(0, len(messages) - _MOST_MESSAGES),
        "turns": list(_turns(trajectory)),
        "prompt_tokens": _count(trajectory, SegmentKind.PROMPT),
        "observation_tokens": _count(trajectory, SegmentKind.OBSERVATION),
        "action_tokens": _count(trajectory, SegmentKind.ACTION),
        "sequences": [_thread(trajectory, n) for n in range(len(trajectory.sequences))],
        "branch": None
        if branch is None
        else {"attempt": branch.attempt, "segments": branch.segments, "state": branch.state},
        "spans": [
            {
                "kind": span.kind,
                "start": plain(span.start),
                "seconds": plain(span.seconds),
                "name": _safe(span.name[:300]),
                "turn": span.turn,
            }
            for span in trajectory.spans[:2000]
        ],
        "renders": [
            {
                "turn": render.turn,
                "env": _safe(render.env),
                "text": _safe(render.text),
                "picture": _media_json(render.picture.kind, render.picture.sha256, media)
                if render.picture is not None
                else None,
            }
            for render in trajectory.renders[:1000]
        ],
    }


def shown_messages(trajectory: Trajectory) -> list[Message]:
    """The conversation; of an episode that ended before it began, the task's."""
    return trajectory.messages or list(trajectory.task.messages)


def _with_turns(
    trajectory: Trajectory, messages: Sequence[Message]
) -> Iterator[tuple[Message, int | None]]:
    """Each message with the turn that it is; None for what the model did not say."""
    asked, turn = len(trajectory.asked), 0
    for place, message in enumerate(messages):
        is_said = message.role == "assistant" and place >= asked
        yield message, turn if is_said else None
        turn += is_said


def _turns(trajectory: Trajectory) -> Iterator[Json]:
    for number, sequence in enumerate(trajectory.sequences):
        for place, segment in enumerate(sequence.segments):
            if segment.kind is not SegmentKind.ACTION:
                continue
            yield {
                "sequence": number,
                "segment": place,
                "tokens": len(segment.tokens),
                "finish": None if segment.finish is None else segment.finish.value,
                "reward": plain(segment.reward),
                "seconds": plain(segment.seconds),
                "faults": [
                    {"fault": fault.value, "tool": _safe(tool)}
                    for fault, tool in zip(
                        segment.faults, [*segment.faulted, *[""] * len(segment.faults)], strict=False
                    )
                ],
                "versions": [[span.start, span.version] for span in segment.versions],
                "logprob": _mean(segment.logprobs),
                "advantage": _mean(segment.advantages),
                "entropy": _mean(segment.entropies),
            }


def _thread(trajectory: Trajectory, number: int) -> Json:
    sequence = trajectory.sequences[number]
    turns = sum(segment.kind is SegmentKind.ACTION for segment in sequence.segments)
    return {"tokens": len(sequence), "turns": turns, "parent": sequence.parent}


def _count(trajectory: Trajectory, kind: SegmentKind) -> int:
    return sum(len(s.tokens) for one in trajectory.sequences for s in one.segments if s.kind is kind)


def _mean(values: Sequence[float] | None) -> float | None:
    found = [value for value in values or () if value == value]
    return plain(sum(found) / len(found)) if found else None


def _message_json(message: Message, number: int, turn: int | None, media: MediaStore | None) -> Json:
    return {
        "number": number,
        "turn": turn,
        "role": message.role,
        "name": None if message.name is None else _safe(message.name[:300]),
        "content": _cut(message.content, MOST_CHARS),
        "chars": len(message.content),
        "calls": [_call_json(call) for call in message.tool_calls[:100]],
        "call_id": message.tool_call_id,
        "media": [_media_json(one.kind, one.sha256, media) for one in message.media[:50]],
    }


def _call_json(call: ToolCall) -> Json:
    return {
        "id": _safe(call.id[:200]),
        "name": _safe(call.name[:300]),
        "arguments": [
            [_safe(str(name)[:300]), _cut(value if isinstance(value, str) else dump_value(value)[0])]
            for name, value in list(call.arguments.items())[:100]
        ],
        "fault": None if call.fault is None else call.fault.value,
        "problem": _safe(call.problem[:2000]),
    }


def _media_json(kind: str, sha256: str, media: MediaStore | None) -> Json:
    kept = media is not None and media.path(sha256) is not None
    return {"kind": _safe(kind), "sha256": _safe(sha256[:64]), "kept": kept}


def _segment_json(
    segment: Segment, number: int, start: int, stop: int, tokenizer: Tokenizer | None
) -> Json:
    part = slice(start, stop)
    ids = segment.tokens[part]
    return {
        "segment": number,
        "kind": segment.kind.value,
        "start": start,
        "ids": ids,
        "texts": token_texts(ids, tokenizer),
        "logprobs": plain(segment.logprobs[part]) if segment.logprobs is not None else None,
        "advantages": plain(segment.advantages[part]) if segment.advantages is not None else None,
        "entropies": plain(segment.entropies[part]) if segment.entropies is not None else None,
        "versions": [[span.start, span.version] for span in segment.versions],
    }


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str] | None:
    """The text of each token; a character of several tokens is given to the last, the others are empty."""
    if tokenizer is None:
        return None
    texts: list[str] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(number)
        try:
            text = tokenizer.decode(waiting)
        except (ValueError, OverflowError, IndexError, TypeError):
            text = f"<{number}>"
        if text.endswith("\ufffd") and len(waiting) < 4:
            texts.append("")
            continue
        texts.append(_safe(text))
        waiting = []
    if waiting:
        texts[-1] = _safe(tokenizer.decode(waiting))
    return texts


def _cut(text: str, most: int = _MOST_ARGUMENTS) -> str:
    return _safe(text[:most])


def _safe(text: str) -> str:
    """Text that JSON in UTF-8 can carry: lone surrogates are shown as what they are."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def dump_json(value: Any) -> bytes:
    """JSON without NaN, for browsers."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


PictureOf = Callable[[str], bytes | None]
"""The bytes of a picture by its hash, or None."""


@cache
def _style() -> str:
    return (STATIC / "export.css").read_text(encoding="utf-8")


def export_page(title: str, episodes: Sequence[Json], picture_of: PictureOf | None = None) -> str:
    if not episodes:
        raise NotFound("there is no episode to export")
    columns = "".join(_episode(one, picture_of or (lambda _: None)) for one in episodes)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_style()}</style></head><body>"
        f"<header><h1>{_text(title)}</h1><p>Exported by Ludus.</p></header>"
        f'<main class="columns n{min(len(episodes), 4)}">{columns}</main></body></html>'
    )


def _episode(one: Json, picture_of: PictureOf) -> str:
    facts = [
        ("run", one.get("run")),
        ("step", one.get("step")),
        ("attempt", one["attempt"]),
        ("ended", one["stop"]),
        ("turns", len(one["turns"])),
        ("tokens", one["action_tokens"]),
    ]
    reward = "not scored" if one["reward"] is None else f"{one['reward']:.4g}"
    parts = "".join(f"<li>{_text(name)} <b>{_number(value)}</b></li>" for name, value in one["rewards"])
    listed = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts if value is not None
    )
    failure = one["failure"]
    lost = (
        f"<p class=fault>Lost at {_text(failure['boundary'])}: {_text(failure['message'])}</p>"
        if failure
        else ""
    )
    renders: dict[int, list[Json]] = {}
    for render in one["renders"]:
        renders.setdefault(render["turn"], []).append(render)
    blocks = []
    for message in one["messages"]:
        number, turn = message["turn"], None
        if number is not None:
            blocks += [_render(render, picture_of) for render in renders.pop(number, [])]
            turn = one["turns"][number] if number < len(one["turns"]) else None
        blocks.append(_message(message, turn))
    blocks += [_render(render, picture_of) for left in renders.values() for render in left]
    return (
        f"<article><h2>{_text(one['task']['id'] or 'task')}</h2><p class=reward>{_text(reward)}</p>"
        f"<ul class=parts>{parts}</ul><dl>{listed}</dl>{lost}{''.join(blocks)}</article>"
    )


def _message(message: Json, turn: Json | None) -> str:
    more = message["chars"] - len(message["content"])
    cut = f"<p class=cut>… {more} characters left out</p>" if more > 0 else ""
    calls = "".join(_call(call) for call in message["calls"])
    facts = ""
    if turn is not None:
        shown = [
            (name, turn[name])
            for name in ("reward", "advantage", "logprob", "entropy")
            if turn[name] is not None
        ]
        facts = "".join(f"<span>{name} {_number(value)}</span>" for name, value in shown)
        facts += "".join(f"<span class=fault>{_text(one['fault'])}</span>" for one in turn["faults"])
    name = f" · {_text(message['name'])}" if message["name"] else ""
    return (
        f"<section class='{_text(message['role'])}'><h3>{_text(message['role'])}{name} {facts}</h3>"
        f"<pre>{_text(message['content'])}</pre>{cut}{calls}</section>"
    )


def _call(call: Json) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in call["arguments"])
    fault = (
        f"<p class=fault>{_text(call['fault'])}: {_text(call['problem'])}</p>" if call["fault"] else ""
    )
    return f"<div class=call><b>{_text(call['name'])}</b><dl>{rows}</dl>{fault}</div>"


def _render(render: Json, picture_of: PictureOf) -> str:
    if render["picture"] is None:
        return f"<pre class=render>{_text(render['text'])}</pre>"
    data = picture_of(render["picture"]["sha256"])
    kind = picture_type(data) if data is not None and len(data) <= _MOST_PICTURE_BYTES else None
    if data is None or kind is None:
        return ""
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img class=render alt="{_text(render["env"])}" src="{source}">'


def picture_type(data: bytes) -> str | None:
    """The type of a picture by its first bytes; None for others, such as SVG, which can hold scripts."""
    for start, kind in (
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"GIF8", "image/gif"),
    ):
        if data.startswith(start):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _text(value: object) -> str:
    """Text that is shown and not obeyed: markup is escaped, control and direction characters are visible."""
    return escape(printable(str(value)), quote=True)
