"""Who is next: long prompts let others pass, nobody starves, nothing is computed twice, budgets are kept."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_models import make, prompts
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig, Request, Scheduler
from ludus.engine.embedded.block_manager import BlockManager
from ludus.engine.embedded.request import Chunk

BLOCK = 4


def request(tokens: list[int], new: int = 3, session: str | None = None, score: bool = False) -> Request:
    return Request(
        tokens=list(tokens),
        prompt=len(tokens),
        limit=len(tokens) + (0 if score else new),
        sampling=Sampling(max_tokens=new),
        reply=lambda outcome: None,
        session=session,
        is_score=score,
    )


@dataclass
class Run:
    """A scheduler, and a model that samples the same token for ever."""

    budget: int
    blocks: int = 1000
    rows: int = 8
    steps: int = 0
    computed: int = 0
    finished: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            BlockManager(self.blocks, BLOCK, lambda source, target: None), self.rows, self.budget
        )

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.plan()
        self.steps += 1
        self.computed += sum(chunk.stop - chunk.start for chunk in chunks)
        for chunk in chunks:
            done = chunk.request
            if chunk.samples:
                done.in_flight -= 1
                if done.accept(7, 0.0) is None:
                    continue
            elif not done.is_score or chunk.stop < len(done.tokens):
                continue
            self.scheduler.finish(done)
            self.finished.append(done)
        self.scheduler.block_manager.pool.check()
        return chunks


def sizes(chunks: list[Chunk]) -> dict[int, int]:
    return {id(chunk.request): chunk.stop - chunk.start for chunk in chunks}


def test_a_short_prompt_passes_a_long_one_in_the_next_step() -> None:
    run = Run(budget=20)
    long, short = request(list(range(200))), request([900, 901, 902])
    run.scheduler.add(long)
    assert sizes(run.step()) == {id(long): 20}, "alone it has all of the step"
    run.scheduler.add(short)
    assert sizes(run.step()) == {id(long): 17, id(short): 3}, "what others leave is the long one's"
    assert sizes(run.step()) == {id(long): 19, id(short): 1}, "decoding goes on"


def test_half_of_a_step_is_the_long_prompts_whoever_waits() -> None:
    run = Run(budget=20, rows=30)
    long = request(list(range(200)))
    for one in (long, *(request([1000 + 10 * i + j for j in range(7)]) for i in range(30))):
        run.scheduler.add(one)
    while long.unscheduled > 20:
        decoding = sum(one.is_decoding for one in run.scheduler.running)
        chunks = run.step()
        assert sizes(chunks)[id(long)] >= (20 - decoding) / 2
        assert sum(sizes(chunks).values()) == 20
    assert run.finished, "others were served meanwhile"


def test_a_prompt_of_more_than_half_a_step_passes_in_two() -> None:
    run = Run(budget=20)
    long, other = request(list(range(200))), request(list(range(500, 518)))
    run.scheduler.add(long)
    run.scheduler.add(other)
    assert sizes(run.step()) == {id(long): 10, id(other): 10}
    assert sizes(run.step()) == {id(long): 12, id(other): 8}
    assert other.is_decoding


def test_a_prompt_that_a_step_can_finish_lets_nobody_pass() -> None:
    run = Run(budget=20)
    first, second = request(list(range(19))), request([500, 501, 502])
    run.scheduler.add(first)
    run.scheduler.add(second)
    assert sizes(run.step()) == {id(first): 19, id(second): 1}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_same_long_prompt_is_computed_once(share: float) -> None:
    run = Run(budget=20)
    run.scheduler.long_share = share
    long = list(range(207))
    group = [request(long) for _ in range(4)]
    for one in group:
        run.scheduler.add(one)
    while run.scheduler.has_work:
        run.step()
    own = len(group) * (BLOCK + 3)  # the end of the prompt that fills no block, and what is sampled
    assert run.computed <= len(long) + own


def test_who_shares_a_part_of_a_long_prompt_waits_for_that_part_alone() -> None:
    run = Run(budget=20)
    long = request(list(range(200)))
    branch = request([*range(60), 900, 901])
    run.scheduler.add(long)
    run.scheduler.add(branch)
    for _ in range(3):
        assert sizes(run.step()) == {id(long): 20}
    assert sizes(run.step()) == {id(long): 18, id(branch): 2}


def test_sessions_that_go_on_pass_with_what_is_new() -> None:
    run = Run(budget=20)
    first = request(list(range(300, 360)), session="s")
    run.scheduler.add(first)
    while run.scheduler.has_work:
        run.step()
    long, turn = request(list(range(200))), request([*first.tokens, 9, 9, 9], session="s")
    run.scheduler.add(long)
    run.scheduler.add(turn)
    assert sizes(run.step())[id(turn)] == 4  # its last token was sampled and not computed


def test_blocks_of_the_long_prompt_are_kept_for_it() -> None:
    run = Run(budget=20, blocks=55)
    long = request(list(range(200)))
    others = [request(list(range(1000 * i, 1000 * i + 12)), new=1) for i in range(1, 9)]
    for one in (long, *others):
        run.scheduler.add(one)
    while not long.is_decoding:
        run.step()
    assert run.scheduler.preemptions == 0 and run.finished


@pytest.mark.parametrize("blocks", [56, 120, 1000])
def test_long_prompts_are_served_while_short_ones_keep_coming(blocks: int) -> None:
    run = Run(budget=20, rows=4, blocks=blocks)
    long = [request(list(range(1000 * i, 1000 * i + 200)), session=f"long {i}") for i in (1, 2, 3)]
    for one in long:
        run.scheduler.add(one)
    while not all(one.is_done for one in long):
        assert run.steps < 300
        start = 10_000 + 100 * run.steps
        run.scheduler.add(request(list(range(start, start + 10)), new=5, session=f"{run.steps}"))
        run.step()
    assert len(run.finished) > 2 * len(long), "and so are the others"


PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step before which it arrives
        st.sampled_from([1, 3, 7, 9, 15, 40, 90]),
        st.integers(0, 2),  # which text it is the beginning of
        st.integers(1, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@given(
    PROMPTS,
    st.integers(4, 24),
    st.integers(1, 4),
    st.sampled_from([30, 60, 1000]),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_everybody_is_served_within_the_budget(
    arrivals: list[tuple[int, int, int, int, bool]], budget: int, rows: int, blocks: int, share: float
) -> None:
    run = Run(budget=budget, rows=rows, blocks=blocks)
    run.scheduler.long_share = share
    queued = sorted(
        (when, number, request([1000 * text + i for i in range(size)], new, score=score))
        for number, (when, size, text, new, score) in enumerate(arrivals)
    )
    total = 0
    while queued or run.scheduler.has_work:
        while queued and queued[0][0] <= run.steps:
            run.scheduler.add(queued.pop(0)[2])
            total += 1
        decoding = [one for one in run.scheduler.running if one.is_decoding]
        oldest = next((one for one in run.scheduler.running if not one.is_decoding), None)
        before = oldest.unscheduled if oldest else 0
        chunks = run.step()
        given = sizes(chunks)
        assert len(given) == len(chunks), "one chunk for each"
        assert sum(given.values()) <= budget
        if not run.scheduler.preemptions:
            assert all(given.get(id(one), 0) == 1 for one in decoding), "decoding goes on in every step"
            if oldest is not None:
                room = budget - len(decoding)
                assert given[id(oldest)] >= min(before, math.ceil(room * share))
            if any(one.unscheduled > 1 for one in run.scheduler.running if not one.is_decoding):
                assert sum(given.values()) == budget, "no part of a step is lost"
        assert run.steps < 3000
    assert len(run.finished) == total
    pool = run.scheduler.block_manager.pool
    assert pool.available == pool.blocks


async def test_what_is_sampled_does_not_depend_on_who_passes() -> None:
    model = make(max_position_embeddings=512)
    contexts = prompts([400, 5, 30, 400, 12, 70, 3], seed=5)
    contexts += [[*contexts[0][:200], 3, 4], contexts[0]]

    async def sampled(config: EngineConfig, share: float) -> list[Any]:
        engine = EmbeddedEngine(model, config=config)
        engine._core.scheduler.long_share = share
        found = await asyncio.gather(
            *(
                engine.generate(one, Sampling(max_tokens=12, temperature=0.9, seed=number))
                for number, one in enumerate(contexts)
            )
        )
        engine._core.scheduler.block_manager.pool.check()
        await engine.close()
        return [one.tokens for one in found]

    expected = await sampled(EngineConfig(), 1.0)
    for budget in (9, 64, 257):
        for cache in (None, 480):
            config = EngineConfig(tokens_per_step=budget, max_running=8, cache_tokens=cache)
            assert await sampled(config, 0.5) == expected
