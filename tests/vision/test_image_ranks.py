"""Images on two trainer ranks, or four (slow): as on one, also where one of them has no image to look at."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vision_families import save_qwen3_vl
from vision_models import noise, save_gemma3, save_idefics3, save_llava, save_llava_next

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from test_ranks import (
    assert_close,
    assert_same_weights,
    learner_on,
    load_state_of,
    save_state_of,
)

from called_ranks import ALONE, CalledRanks, called_ranks
from ludus.chat import Renderer, load_format
from ludus.core import Group, LudusError, Media, Message, Segment, SegmentKind, StopReason, Task
from ludus.core.trajectory import TokenSequence, Trajectory
from ludus.model import use_ludus_attention
from ludus.model.images import vision_parameters
from ludus.training import Critic, CriticConfig, PreferenceConfig, RLConfig, RolloutBatch, load_model
from ludus.training.config.run import ModelConfig
from ludus.training.models.references import AdapterReference, sync_reference
from ludus.training.optim.critic import ValueModel
from ludus.training.optim.learner import frozen
from ludus.training.stages.preference import pairs_of
from played_steps import loss_on, policy_update, prefer, sft_step

pytestmark = pytest.mark.timeout(300)
SLOW = pytest.mark.slow
SAVERS = {
    "llava": save_llava,
    "idefics3": save_idefics3,
    "llava next": save_llava_next,
    "gemma3": save_gemma3,
    "qwen3_vl": save_qwen3_vl,
}
OPTIMIZER: Any = {"learning_rate": 5e-5, "micro_batch_tokens": 64}
"""Adam divides by the gradient's size: where that is rounding alone, a weight moves by a share of the rate."""
SHOWN: list[tuple[Media, ...]] = [
    (noise(1),),
    (),
    (noise(2, (40, 30)), noise(3)),
    (),
    (noise(1), noise(1)),
    (noise(4, (16, 50)),),
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=SLOW)], ids=["two", "four"])
def pair(request: pytest.FixtureRequest) -> Iterator[CalledRanks]:
    ranks = called_ranks(trainer_ranks=request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = SAVERS[family](tmp_path_factory.mktemp("model"))
        return made[family]

    return folder


def loaded(folder: Path, **more: Any) -> tuple[Any, Renderer]:
    config = ModelConfig.parse({"name": str(folder), "device": "cpu", **more})
    model, tokenizer = load_model(config, 0)
    use_ludus_attention(model)
    return model, Renderer(tokenizer, load_format("hermes"))


def episodes(renderer: Renderer, seed: int, shown: Sequence[tuple[Media, ...]] = SHOWN) -> RolloutBatch:
    """Groups of two attempts; those at one task are shown the same images, or none, and later another."""
    source = random.Random(seed)
    groups = []
    for number, images in enumerate(shown):
        task = Task.of("x", id=str(number))
        opening = renderer.opening(
            [Message("user", "what is this " * source.randint(1, 4), media=images)]
        )
        attempts = []
        for attempt in range(2):
            prompt = Segment(SegmentKind.PROMPT, opening.tokens, media=opening.media)
            segments = [prompt, _said(source)]
            if images and attempt:
                later = renderer.opening([Message("tool", "look", media=(noise(9 + number),))])
                segments.append(Segment(SegmentKind.OBSERVATION, later.tokens, media=later.media))
                segments.append(_said(source))
            attempts.append(
                Trajectory(
                    task,
                    [TokenSequence(segments)],
                    stop=StopReason.ANSWERED,
                    reward=float(attempt) + source.random(),
                    attempt=attempt,
                )
            )
        groups.append(Group(task, attempts))
    return RolloutBatch(groups, frozenset(), [0] * len(groups), {})


def _said(source: random.Random) -> Segment:
    count = source.randint(1, 9)
    tokens = [source.randrange(5, 200) for _ in range(count)]
    return Segment(SegmentKind.ACTION, tokens, [-source.random() for _ in range(count)])


def all_of(batch: RolloutBatch) -> list[Trajectory]:
    return [t for group in batch.groups for t in group.trajectories]


Work = Callable[[CalledRanks], tuple[list[dict[str, float]], nn.Module]]


def on_both(work: Work, pair: CalledRanks) -> nn.Module:
    (one, model), (two, other) = work(ALONE), work(pair)
    for rows in (one, two):
        for row in rows:
            row.pop("prefix_sharing", None)  # how rows are dealt out is another matter
    assert_close(one, two)
    assert_same_weights(model, other)
    assert any(row.get("gradient_norm", 0.0) > 0 for row in one)
    return model


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        ("llava", "trained"),
        pytest.param("idefics3", "frozen", marks=SLOW),
        pytest.param("llava", "frozen", marks=SLOW),
        pytest.param("idefics3", "trained", marks=SLOW),
        pytest.param("llava next", "trained", marks=SLOW),
        pytest.param("gemma3", "trained", marks=SLOW),
        pytest.param("qwen3_vl", "trained", marks=SLOW),
    ],
)
def test_sft_and_rl_on_two_ranks(
    pair: CalledRanks, folders: Callable[[str], Path], family: str, vision: str
) -> None:
    """Rows with, without and with several images; a rank with none; and steps in which nobody has any."""
    config = RLConfig.parse({"kl": 0.1, "updates": 2, "correction": "truncated"})
    before, renderer = loaded(folders(family), vision=vision)
    batches = [episodes(renderer, seed) for seed in range(2)]
    given = [
        all_of(batches[0]),
        all_of(episodes(renderer, 5, [(noise(1),), ()])),
        all_of(episodes(renderer, 6, [(), ()])),
        all_of(episodes(renderer, 7, [(noise(2),)]))[:1],  # the other rank has nothing at all
    ]

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model, _ = loaded(folders(family), vision=vision)
        policy, learner = learner_on(ranks, model, **OPTIMIZER)
        rows = [ranks.run(sft_step, learner, shown) for shown in given]
        rows[-1]["held_out"] = ranks.run(loss_on, learner, given[0])
        start, _ = loaded(folders(family), vision=vision)
        reference = ranks.shard(frozen(start))
        for batch in batches:
            update = ranks.run(policy_update, learner, batch, config, reference=reference, critic=None)
            rows.append(update)
            ranks.run(sync_reference, reference, policy, 0.5)
        ranks.publish(policy, model)
        return rows, model

    after = on_both(work, pair)
    moved = [
        not bool((one == other).all())
        for one, other in zip(vision_parameters(before), vision_parameters(after), strict=True)
    ]
    assert any(moved) == (vision == "trained")


@SLOW
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llava", "model"), ("llava", "head"), ("gemma3", "model"), ("qwen3_vl", "model")],
)
def test_a_critic_on_two_ranks(
    pair: CalledRanks, folders: Callable[[str], Path], family: str, kind: Any
) -> None:
    _, renderer = loaded(folders(family))
    batches = [episodes(renderer, seed) for seed in range(2)]
    config = RLConfig.parse({"algorithm": "ppo"})

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model, _ = loaded(folders(family))
        policy, learner = learner_on(ranks, model, **OPTIMIZER)
        values = ranks.shard(ValueModel(model, own_trunk=kind == "model"))
        chosen = CriticConfig.parse({"kind": kind, "optimizer": OPTIMIZER})
        critic = ranks.make(Critic, policy, chosen, 20, 0, values)
        rows = [
            ranks.run(policy_update, learner, batch, config, reference=None, critic=critic)
            for batch in batches
        ]
        ranks.publish(policy, model)
        return rows, model

    on_both(work, pair)


@SLOW
def test_an_adapter_and_preferences_on_two_ranks(
    pair: CalledRanks, folders: Callable[[str], Path]
) -> None:
    pytest.importorskip("peft")
    _, renderer = loaded(folders("llava"))
    batch = episodes(renderer, 3)
    pairs = pairs_of(batch.groups)
    assert len(pairs) == len(batch.groups)

    def work(ranks: CalledRanks) -> tuple[list[dict[str, float]], nn.Module]:
        model, _ = loaded(folders("llava"), lora={"rank": 2})
        policy, learner = learner_on(ranks, model, **OPTIMIZER)
        reference: nn.Module = ranks.make(AdapterReference, policy, None)
        rows = [ranks.run(prefer, learner, pairs, reference, PreferenceConfig()) for _ in range(2)]
        config = RLConfig.parse({"kl": 0.1})
        update = ranks.run(policy_update, learner, batch, config, reference=reference, critic=None)
        ranks.publish(policy, model)
        return [*rows, update], model

    on_both(work, pair)


@SLOW
def test_state_goes_from_two_ranks_to_one_and_back(
    pair: CalledRanks, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    _, renderer = loaded(folders("llava"))
    shown = all_of(episodes(renderer, 1))
    ends: list[tuple[list[dict[str, float]], nn.Module]] = []
    for number, order in enumerate([[ALONE] * 3, [pair, ALONE, pair]]):
        (model, _), metrics = loaded(folders("llava"), vision="trained"), []
        for turn, ranks in enumerate(order):
            policy, learner = learner_on(ranks, model, **OPTIMIZER)
            if turn:
                ranks.run(load_state_of, learner, tmp_path / f"{number}-{turn - 1}")
            metrics += [ranks.run(sft_step, learner, shown[turn + i : 8 - i]) for i in range(2)]
            ranks.publish(policy, model)
            ranks.run(save_state_of, learner, tmp_path / f"{number}-{turn}")
        ends.append((metrics, model))
    for rows, _ in ends:
        for row in rows:
            row.pop("prefix_sharing", None)
    assert_close(ends[0][0], ends[1][0])
    assert_same_weights(ends[0][1], ends[1][1])


def test_an_image_that_is_gone_ends_the_step_on_all_ranks(
    pair: CalledRanks, folders: Callable[[str], Path]
) -> None:
    model, renderer = loaded(folders("llava"), vision="trained")
    shown = all_of(episodes(renderer, 1))
    lost = all_of(episodes(renderer, 2, [(noise(77),), (), ()]))
    for span in lost[0].sequences[0].segments[0].media:
        object.__setattr__(span, "data", None)
    _, learner = learner_on(pair, model)
    with pytest.raises(LudusError, match="not at hand"):
        pair.run(sft_step, learner, lost)
    assert pair.run(sft_step, learner, shown)["gradient_norm"] > 0
