"""Precision and recall of each filter of `ludus check data` on planted faults, and its speed.

    python benchmarks/data_quality.py [--episodes 300] [--speed 100000] [--embedder sentence:minilm]

Real episodes at a travel desk (find offers, look at prices, book the cheapest), a share of which is damaged in
a known way. A filter's recall is the share of its faults that were left out for its reasons; its precision, the
share of what it left out that had such a fault. Clean episodes are of several styles, some close to the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from reworded_tasks import TASKS

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Message, Task, ToolCall, Trajectory
from ludus.core.messages import ToolResult
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, tools_of
from ludus.llm.embeddings import HashedWords, load_embedder
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.synth import SynthContext, SynthFolder
from ludus.synth.quality.pipeline import QualityConfig, QualityPipeline
from ludus.synth.quality.similarity import (
    DuplicateIndex,
    HeldOut,
    Senses,
    asked,
    cluster,
    shingles,
    sketch,
)
from ludus.tools import as_toolset, tool
from ludus.worlds import sql

HERMES = load_format("hermes")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Quito", "Perth", "Turin", "Hanoi", "Lyon", "Porto")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon", "Kai", "Lea")


class Desk(Env):
    """Offers with prices; the same for the same seed."""

    deterministic = True

    async def reset(self, task: Task, seed: int, offers: int) -> None:
        draw = Random(seed)
        self.prices = {
            f"of{draw.randrange(10**5, 10**6)}x": draw.randrange(40, 900) for _ in range(offers)
        }
        self.booked: tuple[str, str] | None = None

    @tool
    async def find(self, city: str, limit: int = 9) -> str:
        """Offers in a city."""
        return "offers: " + ", ".join(list(self.prices)[:limit])

    @tool
    async def price(self, offer: str) -> str:
        """What an offer costs."""
        return f"{offer} costs {self.prices[offer]}" if offer in self.prices else "no such offer"

    @tool
    async def book(self, offer: str, name: str) -> ToolResult:
        """Book an offer."""
        self.booked = offer, name
        return ToolResult(f"booked {offer} for {name}", terminated=True)


@reward(name="success")
async def cheapest(env: Desk, task: Task) -> float:
    """1 when the cheapest offer was booked for the right person."""
    best = min(env.prices, key=lambda one: env.prices[one])
    return float(env.booked == (best, task.metadata["name"]))


def make_task(number: int, prefix: str = "trip") -> Task:
    draw = Random(f"{prefix}{number}")
    city, name = draw.choice(CITIES), draw.choice(NAMES)
    seed, offers = draw.randrange(10**6), draw.choice((2, 3, 4, 5))
    told = f"Please book the cheapest offer in {city} for {name}. The reference of this request is {number}."
    return Task.of(
        told,
        id=f"{prefix}-{number}",
        envs={"desk": {"seed": seed, "offers": offers}},
        name=name,
        city=city,
    )


def plan(task: Task, attempt: int) -> list[tuple[str, ToolCall]]:
    """What a good agent does, in one of several styles."""
    draw = Random(f"{task.id}/{attempt}")
    arguments = task.envs["desk"]
    offer_draw = Random(arguments["seed"])
    prices = {
        f"of{offer_draw.randrange(10**5, 10**6)}x": offer_draw.randrange(40, 900)
        for _ in range(arguments["offers"])
    }
    order = list(prices)
    draw.shuffle(order)
    city, name = task.metadata["city"], task.metadata["name"]
    found = {"city": city} | ({"limit": 9} if draw.random() < 0.3 else {})
    steps = [(draw.choice(("First the offers.", f"What is there in {city}?")), ToolCall("find", found))]
    steps += [(f"What does {one} cost?", ToolCall("price", {"offer": one})) for one in order]
    if draw.random() < 0.2:  # to be sure
        steps.append(("Once more, to be sure.", ToolCall("price", {"offer": order[0]})))
    best = min(prices, key=lambda one: prices[one])
    steps.append((f"{best} is the cheapest.", ToolCall("book", {"offer": best, "name": name})))
    return steps


def rollout_of(tasks: Sequence[Task]) -> Rollout:
    known = {task.id: task for task in tasks}
    turns: Counter[str] = Counter()

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        assert session is not None
        _, name, attempt, _ = session.rsplit("/", 3)
        thought, call = plan(known[name], int(attempt))[turns[session]]
        turns[session] += 1
        return HERMES.render_action(thought, [call])

    renderer = Renderer(ByteTokenizer(), HERMES)
    return Rollout(
        engine=FakeEngine(script, renderer.tokenizer),
        renderer=renderer,
        scorer=Scorer([cheapest]),
        tools=as_toolset(()),
        pools={"desk": EnvPool(Desk, name="desk")},
        budgets=Budgets.parse({"max_turns": 60, "max_turn_tokens": 400, "max_tokens": 60_000}),
    )


# Faults. Each is a function of an episode and a draw; what it returns is stored as if it had been played.


def said(thought: str, *calls: ToolCall) -> Message:
    return Message("assistant", HERMES.render_action(thought, list(calls)), tuple(calls))


def changed(episode: Trajectory, place: int, message: Message | None) -> Trajectory:
    messages = list(episode.messages)
    messages[place : place + 1] = [] if message is None else [message]
    return replace(episode, messages=messages)


def calling(episode: Trajectory, name: str) -> list[int]:
    return [
        i for i, one in enumerate(episode.messages) if one.tool_calls and one.tool_calls[0].name == name
    ]


def with_call(episode: Trajectory, place: int, call: ToolCall) -> Trajectory:
    old = episode.messages[place]
    return changed(episode, place, said("I go on.", replace(call, id=old.tool_calls[0].id)))


def bad_arguments(episode: Trajectory, draw: Random) -> Trajectory:
    wrong = draw.choice(
        [{"offer": 7}, {"offers": "a"}, {}, {"offer": "a", "name": "b", "seat": 3}, {"offer": None}]
    )
    return with_call(episode, draw.choice(calling(episode, "price")), ToolCall("price", wrong))


def unknown_tool(episode: Trajectory, draw: Random) -> Trajectory:
    place = draw.choice(calling(episode, "price"))
    return with_call(episode, place, replace(episode.messages[place].tool_calls[0], name="get_price"))


def invented_id(episode: Trajectory, draw: Random) -> Trajectory:
    place = draw.choice(calling(episode, "price"))
    made = f"of{draw.randrange(10**5, 10**6)}y"
    return with_call(episode, place, ToolCall("price", {"offer": made}))


def lost_result(episode: Trajectory, draw: Random) -> Trajectory:
    return changed(episode, draw.choice(calling(episode, "price")) + 1, None)


def foreign_result(episode: Trajectory, draw: Random) -> Trajectory:
    place = draw.choice(calling(episode, "price")) + 1
    return changed(episode, place, replace(episode.messages[place], name="weather"))


def useless_searches(episode: Trajectory, draw: Random) -> Trajectory:
    first = calling(episode, "find")[0]
    again = episode.messages[first : first + 2]
    messages = list(episode.messages)
    messages[first:first] = [one for _ in range(5) for one in again]
    return replace(episode, messages=messages)


def empty_searches(episode: Trajectory, draw: Random) -> Trajectory:
    """Five searches in other cities, which find nothing: each is another call."""
    first = calling(episode, "find")[0]
    more: list[Message] = []
    for number, city in enumerate(draw.sample(["Bonn", "Kiel", "Gent", "Pisa", "Cork", "Graz"], 5)):
        call = ToolCall("find", {"city": city}, f"extra_{number}")
        more += [said("Perhaps here.", call), Message("tool", "no results", (), "find", call.id)]
    messages = list(episode.messages)
    messages[first:first] = more
    return replace(episode, messages=messages)


def idle_searches(episode: Trajectory, draw: Random) -> Trajectory:
    """Five searches with other limits, each another call, all with the result that comes anyway."""
    first = calling(episode, "find")[0]
    told = episode.messages[first + 1].content
    more: list[Message] = []
    for number in range(5):
        call = ToolCall("find", {"city": "Rome", "limit": 9 + number}, f"idle_{number}")
        more += [said("Let me look again.", call), Message("tool", told, (), "find", call.id)]
    messages = list(episode.messages)
    messages[first:first] = more
    return replace(episode, messages=messages)


def other_name(episode: Trajectory, draw: Random) -> Trajectory:
    """Booked for somebody who was not mentioned: hard for coherence, since a name is no id."""
    place = calling(episode, "book")[0]
    call = episode.messages[place].tool_calls[0]
    wrong = with_call(episode, place, replace(call, arguments={**call.arguments, "name": "Zoe"}))
    told = replace(wrong.messages[place + 1], content=f"booked {call.arguments['offer']} for Zoe")
    return changed(wrong, place + 1, told)


def too_long(episode: Trajectory, draw: Random) -> Trajectory:
    first = calling(episode, "price")[0]
    more: list[Message] = []
    for number in range(45):
        call = ToolCall("find", {"city": f"{draw.choice(CITIES)} {number}"}, f"more_{number}")
        more += [
            said("And here?", call),
            Message("tool", f"offers: none today, try {number + 1}", (), "find", call.id),
        ]
    messages = list(episode.messages)
    messages[first:first] = more
    return replace(episode, messages=messages)


def in_one_turn(episode: Trajectory, draw: Random) -> Trajectory:
    last = calling(episode, "book")[0]
    offer = episode.messages[last].tool_calls[0].arguments["offer"]
    ask = episode.messages[0]
    told = replace(ask, content=f"{ask.content} It is {offer}.")
    return replace(episode, messages=[told, *episode.messages[last:]])


def lied_result(episode: Trajectory, draw: Random) -> Trajectory:
    place = draw.choice(calling(episode, "price")) + 1
    old = episode.messages[place]
    return changed(episode, place, replace(old, content=f"{old.content}0"))


def wrong_label(episode: Trajectory, draw: Random) -> Trajectory:
    """It books another offer, and is labelled a success."""
    place = calling(episode, "book")[0]
    call = episode.messages[place].tool_calls[0]
    others = [episode.messages[i].tool_calls[0].arguments["offer"] for i in calling(episode, "price")]
    other = draw.choice([one for one in others if one != call.arguments["offer"]])
    worse = with_call(
        episode, place, replace(call, arguments={"offer": other, "name": call.arguments["name"]})
    )
    told = replace(worse.messages[place + 1], content=f"booked {other} for {call.arguments['name']}")
    return changed(worse, place + 1, told)


def reordered_copy(episode: Trajectory, draw: Random) -> Trajectory:
    """Another attempt at the same task that looks at the same prices in another order, with other thoughts."""
    messages = list(episode.messages)
    places = calling(episode, "price")
    if len(places) > 1:
        a, b = sorted(draw.sample(places, 2))
        messages[a : a + 2], messages[b : b + 2] = messages[b : b + 2], messages[a : a + 2]
    rewritten = [
        said(f"Well, number {i}.", *one.tool_calls) if one.tool_calls else one
        for i, one in enumerate(messages)
    ]
    return replace(episode, messages=rewritten, attempt=episode.attempt + 50)


def without_thoughts(episode: Trajectory, draw: Random) -> Trajectory:
    return replace(
        episode,
        messages=[said("", *one.tool_calls) if one.tool_calls else one for one in episode.messages],
    )


Fault = Callable[[Trajectory, Random], Trajectory]
FAULTS: dict[str, tuple[Fault, frozenset[str]]] = {
    "wrong arguments": (bad_arguments, frozenset({"bad_arguments"})),
    "unknown tool": (unknown_tool, frozenset({"unknown_tool"})),
    "invented id": (invented_id, frozenset({"incoherent"})),
    "lost result": (lost_result, frozenset({"incoherent"})),
    "foreign result": (foreign_result, frozenset({"incoherent"})),
    "repeated searches": (useless_searches, frozenset({"wasteful"})),
    "empty searches": (empty_searches, frozenset({"wasteful"})),
    "idle searches": (idle_searches, frozenset({"wasteful"})),
    "other name": (other_name, frozenset({"incoherent", "replay_fails"})),
    "too long": (too_long, frozenset({"too_long"})),
    "one turn": (in_one_turn, frozenset({"too_short"})),
    "lied result": (lied_result, frozenset({"replay_differs"})),
    "wrong label": (wrong_label, frozenset({"replay_fails", "replay_differs"})),
    "reordered copy": (reordered_copy, frozenset({"duplicate"})),
    "no thoughts": (without_thoughts, frozenset({"low_quality"})),
}
HELD_OUT, REWORDED = "held-out task", "held out, reworded"
Measured = tuple[int, float, float, float]


async def measured(
    episodes: int, folder: Path, seed: int = 0, embedder: str = "hashed"
) -> dict[str, Measured]:
    """(planted, recall, precision, left out for any reason) of each fault; of "clean", what was left out."""
    draw = Random(seed)
    tasks = [make_task(number) for number in range(episodes)]
    held_out = [make_task(number, "held") for number in range(40)]
    leaked = [replace(one, id=f"leak-{one.id}") for one in held_out[: max(4, episodes // 14)]]
    rollout = rollout_of([*tasks, *leaked])
    played = [await rollout.play(task, 0, 0) for task in (*tasks, *leaked)]
    assert all(one.reward == 1 for one in played), "the plans are right"
    labelled: list[tuple[str, Trajectory]] = []
    kinds = list(FAULTS)
    for number, one in enumerate(played[:episodes]):
        kind = kinds[number // 2 % len(kinds)] if number % 2 else ""
        if kind == "reordered copy":
            labelled.append(("", one))  # the original stays
        labelled.append((kind, FAULTS[kind][0](one, draw) if kind else one))
    for one in played[episodes:]:  # asked in other words
        text = one.messages[0].content
        for name, new in (
            (HELD_OUT, text.replace("Please book", "Please, book")),
            (
                REWORDED,
                text.replace("Please book the cheapest offer", "Kindly reserve what costs least"),
            ),
        ):
            told = replace(one.messages[0], content=new)
            task = replace(one.task, messages=(told,))
            labelled.append((name, replace(one, task=task, messages=[told, *one.messages[1:]])))
    context = SynthContext((), SynthFolder(folder, {}))
    pipeline = await pipeline_of(rollout, held_out, embedder)
    found = await pipeline.run([one for _, one in labelled], context)
    reasons = {id(one.trajectory): one.reason for one in found.rejected}
    expected = {name: wanted for name, (_, wanted) in FAULTS.items()}
    expected |= dict.fromkeys((HELD_OUT, REWORDED), frozenset({"held_out"}))
    table: dict[str, Measured] = {}
    for name, wanted in expected.items():
        own = [one for kind, one in labelled if kind == name]
        caught = sum(reasons.get(id(one)) in wanted for one in own)
        siblings = {other for other, reason in expected.items() if reason & wanted}
        out = [kind for kind, one in labelled if reasons.get(id(one)) in wanted]
        table[name] = (
            len(own),
            caught / max(1, len(own)),
            sum(kind in siblings for kind in out) / max(1, len(out)),
            sum(id(one) in reasons for one in own) / max(1, len(own)),
        )
    clean = [one for kind, one in labelled if not kind]
    wronged = sum(id(one) in reasons for one in clean) / len(clean)
    return table | {"clean": (len(clean), 0.0, 0.0, wronged)}


async def pipeline_of(
    rollout: Rollout, held_out: Sequence[Task], embedder: str = "hashed"
) -> QualityPipeline:
    specs = {one.name: one.spec for one in await tools_of(Desk(), "desk")}
    settings = QualityConfig(embedder=embedder)
    return QualityPipeline(settings, specs, held_out, {"": rollout}, HERMES.parse)


def wordings(embedder: str, thresholds: Sequence[float]) -> Iterator[tuple[float | None, list[float]]]:
    """For words alone (None) and each cosine, the shares that count as held out: of `reworded_tasks`, and of
    siblings, which are questions to databases against held-out ones of the same template."""
    senses = Senses(load_embedder(embedder))
    senses.of([text for one in TASKS for text in one])
    questions = [
        [asked(one.messages) for one in Random(0).sample(tasks, 100)]
        for tasks in (sql.training_tasks(), sql.held_out_tasks())
    ]
    senses.of([*questions[0], *questions[1]])
    for threshold in (None, *thresholds):
        senses.threshold = threshold or 0.0
        known = senses if threshold else None
        held_out = HeldOut([Task.of(one.task, id=one.task) for one in TASKS], senses=known)
        unrelated = HeldOut([Task.of(one.task, id=one.task) for one in TASKS[::2]], senses=known)
        kinds = [*zip(*(one[1:] for one in TASKS), strict=True)]
        shares = [_share(held_out, texts) for texts in kinds]
        siblings = HeldOut([Task.of(text, id=text) for text in questions[1]], senses=known)
        shares.append(_share(siblings, questions[0]))
        yield threshold, [*shares, _share(unrelated, [text for one in TASKS[1::2] for text in one])]


def _share(held_out: HeldOut, texts: Sequence[str]) -> float:
    return sum(held_out.find(Task.of(text, id=text), ()) is not None for text in texts) / len(texts)


def speed(count: int) -> tuple[float, float]:
    """Seconds for the near-duplicates among so many examples, and for their embeddings and clusters."""
    draw = Random(0)
    texts = [
        f"book the cheapest in {draw.choice(CITIES)} for {draw.choice(NAMES)} number {draw.randrange(count)} "
        + " ".join(f"price of{draw.randrange(10**6)}x" for _ in range(4))
        for _ in range(count)
    ]
    started = time.perf_counter()
    sets = [sketch(shingles(text)) for text in texts]
    index = DuplicateIndex(0.85, sets)
    for one in sets:
        if index.find(one) is None:
            index.add(one)
    middle = time.perf_counter()
    cluster(HashedWords().embed(texts), 0.5)
    return middle - started, time.perf_counter() - middle


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument(
        "--speed", type=int, default=0, help="also time near-duplicates of so many examples"
    )
    parser.add_argument("--embedder", default="hashed", help="what finds reworded tasks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        table = await measured(options.episodes, Path(folder) / "s", 0, options.embedder)
        seconds = time.perf_counter() - started
    print(f"{'fault':<20}{'planted':>8}{'recall':>9}{'precision':>11}{'left out':>10}")
    for name, (count, recall, precision, out) in table.items():
        if name != "clean":
            print(f"{name:<20}{count:>8}{recall:>9.3f}{precision:>11.3f}{out:>10.3f}")
    count, _, _, out = table["clean"]
    print(f"clean episodes left out: {out:.3f} of {count}; {seconds:.1f} s with all replays")
    if options.embedder != "hashed":
        print(f"{'cosine':<8}{'lightly':>9}{'freely':>9}{'other':>9}{'siblings':>10}{'unrelated':>11}")
        for threshold, shares in wordings(options.embedder, (0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9)):
            name = "words" if threshold is None else f"{threshold:.2f}"
            widths = (9, 9, 9, 10, 11)
            print(
                name.ljust(8) + "".join(f"{one:>{w}.3f}" for one, w in zip(shares, widths, strict=True))
            )
    if options.speed:
        alike, clustered = speed(options.speed)
        print(
            f"{options.speed:,} examples: near-duplicates {alike:.1f} s, "
            f"embeddings and clusters {clustered:.1f} s"
        )


if __name__ == "__main__":
    asyncio.run(main())
