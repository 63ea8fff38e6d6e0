"""Random trajectories with everything a trajectory can hold, and text that no file format likes."""

from __future__ import annotations

from hypothesis import strategies as st

from ludus.core import (
    Boundary,
    Failure,
    Fault,
    FinishReason,
    Media,
    MediaSpan,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    Trajectory,
    VersionSpan,
)

# Surrogates, NUL and the escape character itself are drawn far more often than chance would.
texts = st.text(
    st.one_of(st.sampled_from("\x00\ud800\udfff\ud83d\ude00␛$\\\"'\n\r,é漢"), st.characters()),
    max_size=8,
)
floats = st.floats(allow_nan=False, width=64)
counts = st.integers(0, 2**31 - 1)
large = st.integers(-(2**63), 2**63 - 1)

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, texts, st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$float", "$tuple", "$dict", "$repr"]), inner, max_size=2),
        st.dictionaries(st.one_of(st.integers(), st.tuples(st.integers())), inner, max_size=2),
    ),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)

calls = st.builds(
    ToolCall,
    name=texts,
    arguments=objects,
    id=texts,
    fault=st.none() | st.sampled_from(Fault),
    problem=texts,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    name=st.none() | texts,
    tool_call_id=st.none() | texts,
    media=st.lists(st.builds(Media, kind=texts, sha256=texts), max_size=1).map(tuple),
)
tasks = st.builds(
    Task,
    id=texts,
    messages=st.lists(messages, max_size=2).map(tuple),
    target=values,
    envs=st.dictionaries(texts, objects, max_size=2),
    metadata=objects,
)
spans = st.lists(st.builds(VersionSpan, start=counts, version=large), max_size=2).map(tuple)
media = st.lists(st.builds(MediaSpan, sha256=texts, start=counts, stop=counts), max_size=1).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    kind = draw(st.sampled_from(SegmentKind))
    tokens = draw(st.lists(counts, max_size=4))
    size = len(tokens)
    is_action = kind is SegmentKind.ACTION
    return Segment(
        kind=kind,
        tokens=tokens,
        logprobs=draw(st.lists(floats, min_size=size, max_size=size)) if is_action else None,
        versions=draw(spans),
        finish=draw(st.none() | st.sampled_from(FinishReason)),
        calls=draw(st.lists(calls, max_size=1).map(tuple)),
        faults=draw(st.lists(st.sampled_from(Fault), max_size=2).map(tuple)),
        faulted=draw(st.lists(st.text(max_size=5), max_size=2).map(tuple)),
        reward=draw(st.none() | floats),
        seconds=draw(floats),
        media=draw(media),
    )


sequences = st.builds(
    TokenSequence,
    segments=st.lists(segments(), max_size=4),
    parent=st.none() | st.tuples(counts, counts),
)
failures = st.builds(
    Failure, boundary=st.sampled_from(Boundary), kind=texts, message=texts, attempts=counts
)
trajectories = st.builds(
    Trajectory,
    task=tasks,
    sequences=st.lists(sequences, max_size=3),
    messages=st.lists(messages, max_size=3),
    answer=st.none() | texts,
    stop=st.sampled_from(StopReason),
    failure=st.none() | failures,
    rewards=st.dictionaries(texts, floats, max_size=3),
    reward=st.none() | floats,
    attempt=st.integers(0, 2),
    seed=large,
    seconds=st.dictionaries(texts, floats, max_size=2),
)


def episode(
    *,
    task: str = "t",
    reward: float | None = 1.0,
    rewards: dict[str, float] | None = None,
    stop: StopReason = StopReason.ANSWERED,
    failure: Failure | None = None,
    faults: tuple[Fault, ...] = (),
    attempt: int = 0,
) -> Trajectory:
    """A small episode: a question, a call, its result, an answer."""
    call = ToolCall("add", {"a": 2, "b": 3})
    conversation = [
        Message("user", "what is 2+3?"),
        Message("assistant", "I add.", (call,)),
        Message("tool", "5", name="add"),
        Message("assistant", "five"),
    ]
    record = [
        Segment(SegmentKind.PROMPT, [1, 2, 3, 4]),
        Segment(SegmentKind.ACTION, [5, 6], [-0.5, -0.25], calls=(call,), faults=faults),
        Segment(SegmentKind.OBSERVATION, [7, 8, 9]),
        Segment(SegmentKind.ACTION, [10], [-0.125], finish=FinishReason.STOP_TOKEN),
    ]
    return Trajectory(
        task=Task.of("what is 2+3?", 5, id=task),
        sequences=[TokenSequence(record)],
        messages=conversation,
        answer="five",
        stop=stop,
        failure=failure,
        rewards={} if rewards is None else rewards,
        reward=reward,
        attempt=attempt,
        seconds={"generate": 0.5, "tools": 0.25},
    )
