"""Sequences that branch off each other: where a context is appended, and what stands before a place.

A sequence is the tokens of a conversation in segments; `TokenSequence.parent` says which place of another one
it goes on from. What two contexts share is kept once.
"""

from __future__ import annotations

from ludus.core.trajectory import Segment, SegmentKind, TokenSequence

Position = tuple[int, int]
"""(sequence, segment): the place just after that segment."""


def is_end(sequences: list[TokenSequence], position: Position | None) -> bool:
    """Whether nothing follows that place in its sequence."""
    return position is not None and position[1] == len(sequences[position[0]].segments) - 1


def segments_until(sequences: list[TokenSequence], position: Position | None) -> list[Segment]:
    """All segments up to a place, those of the sequences that it branches from included."""
    if position is None:
        return []
    sequence, segment = position
    own = sequences[sequence]
    return [*segments_until(sequences, own.parent), *own.segments[: segment + 1]]


def append_context(
    sequences: list[TokenSequence], context: Segment, after: Position | None
) -> tuple[Position, bool]:
    """Append what the model read before a turn; where that ends, and whether it left an earlier line."""
    if after is None:
        return _append_prompt(sequences, context), False
    sequence, _ = after
    branched = not is_end(sequences, after)
    if branched:
        sequences.append(TokenSequence(parent=after))
        sequence = len(sequences) - 1
    sequences[sequence].segments.append(context)
    return (sequence, len(sequences[sequence].segments) - 1), branched


def append_action(sequences: list[TokenSequence], action: Segment, after: Position) -> Position:
    """Append what was sampled after a context; a second reply to the same begins a sequence of its own."""
    sequence, _ = after
    if not is_end(sequences, after):
        sequences.append(TokenSequence(parent=after))
        sequence = len(sequences) - 1
    sequences[sequence].segments.append(action)
    return sequence, len(sequences[sequence].segments) - 1


def _append_prompt(sequences: list[TokenSequence], prompt: Segment) -> Position:
    """A whole prompt: a new sequence, which shares with an earlier one what begins with the same tokens."""
    if not any(sequence.segments for sequence in sequences):
        sequences[0].segments.append(prompt)
        return 0, 0
    parent, shared = _shared_prefix(sequences, prompt)
    if parent is not None and shared == len(prompt.tokens):
        return parent
    kind = SegmentKind.PROMPT if parent is None else SegmentKind.OBSERVATION
    media = tuple(span.moved(-shared) for span in prompt.media if span.start >= shared)
    sequences.append(TokenSequence([Segment(kind, prompt.tokens[shared:], media=media)], parent))
    return len(sequences) - 1, 0


def _shared_prefix(sequences: list[TokenSequence], prompt: Segment) -> tuple[Position | None, int]:
    """The longest run of whole segments, of any sequence, that a prompt begins with, images included."""
    tokens = prompt.tokens
    images = {span.start: span for span in prompt.media}
    ends: list[list[int]] = []
    """For each sequence, how many tokens are shared up to the end of each of its segments."""
    best: Position | None = None
    most = 0
    for number, sequence in enumerate(sequences):
        own: list[int] = []
        ends.append(own)
        position = 0
        if sequence.parent is not None:
            parent, segment = sequence.parent
            if len(ends[parent]) <= segment:
                continue  # it has left these tokens already
            position = ends[parent][segment]
        for index, segment_ in enumerate(sequence.segments):
            stop = position + len(segment_.tokens)
            if tokens[position:stop] != segment_.tokens:
                break
            own_images = [images[at] for at in sorted(images) if position <= at < stop]
            if own_images != [span.moved(position) for span in segment_.media]:
                break
            position = stop
            own.append(position)
            if position > most:
                best, most = (number, index), position
    return best, most
