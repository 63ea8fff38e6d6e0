"""GRPO in one flat file: task, rollout, reward, advantage, loss, optimizer step, in order. No trainer class.

A support desk with four teams: the agent reads a ticket and assigns it by a tool call. A tiny model is made
from scratch. Demonstrations, right on half of the tickets, teach it the syntax of the call. GRPO teaches it
which team is right, and is measured on tickets that neither stage has seen. One to two minutes on a CPU:

    python examples/grpo_loop.py

`ludus.train` does the same with recipes, checkpoints, resuming, metrics, other algorithms and a GPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

import ludus
from ludus.algos import AdvantageInputs, LossInputs, by_token, clipped_surrogate, grpo
from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Engine, Tokenizer, key
from ludus.engine import EmbeddedEngine, FakeEngine
from ludus.model import PackedContext, head_logits, hidden_states
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Demonstrator, Rollout
from ludus.tools import LocalTools
from ludus.training import ModelConfig, ScratchConfig, load_model

SEED = 0
BETAS = (0.9, 0.99)
WARM_STEPS, WARM_BATCH, WARM_RATE = 300, 32, 1e-3
STEPS, TASKS, ATTEMPTS, MINI_BATCHES, RATE = 20, 16, 8, 2, 1e-3  # a step plays TASKS x ATTEMPTS episodes

# 1. Tasks: a prompt, and a target that only the reward sees.

TEAMS = {"Charged twice": "billing", "No login": "access", "No signal": "network", "Lost parcel": "mail"}
WHO = "baker school pilot farmer nurse museum singer bank lawyer clown painter judge"
TICKETS = [(f"{what}, says a {who}.", team) for who in WHO.split() for what, team in TEAMS.items()]
random.Random(0).shuffle(TICKETS)


def task(number: int, copy: int = 0) -> ludus.Task:
    return ludus.Task.of(*TICKETS[number], id=f"{number}-{copy}")


HELD_OUT = [task(number, copy) for number in range(8) for copy in range(8)]
TRAIN = [task(number, copy) for number in range(8, len(TICKETS)) for copy in range(12)]


# 2. Tools, and an expert who shows how to call them.


@ludus.tool
async def assign(to: str) -> ludus.ToolResult:
    """Assign the ticket to a team."""
    if to not in TEAMS.values():
        raise ludus.ToolFault(f"there is no team {to!r}")  # an observation that the model can learn from
    return ludus.ToolResult("assigned", terminated=True)  # ends the episode


def expert(given: ludus.Task) -> Generator[ludus.ToolCall, str, None]:
    teams = [given.target, given.target, *TEAMS.values()]
    yield ludus.ToolCall("assign", {"to": random.Random(given.id).choice(teams)})


# 3. The reward: a function of the trajectory.


@ludus.reward(name="success")
async def right(trajectory: ludus.Trajectory, target: str) -> float:
    """1 when the ticket went to the right team."""
    return float(any(call.arguments.get("to") == target for call in trajectory.calls))


# 4. From trajectories to tensors: sequences lie end to end, without padding.


def packed(trajectories: Sequence[ludus.Trajectory]) -> tuple[list[int], Tensor, Tensor]:
    """Lengths, tokens and the action mask: True where the model said the token."""
    tokens = [token for trajectory in trajectories for token in trajectory.tokens]
    mask = [said for trajectory in trajectories for said in trajectory.action_mask]
    return (
        [len(trajectory.tokens) for trajectory in trajectories],
        torch.tensor(tokens),
        torch.tensor(mask),
    )


def action_logprobs(model: nn.Module, trajectories: Sequence[ludus.Trajectory]) -> Tensor:
    """The log-probability of each action token, by a forward pass of the module that the engine samples."""
    lengths, tokens_T, action_T = packed(trajectories)
    context = PackedContext(lengths)  # attention within each sequence
    hidden_TD = hidden_states(model, tokens_T, context.position_ids, context)
    place_A = action_T.nonzero().squeeze(1)
    logits_AV = head_logits(model, hidden_TD[place_A - 1])  # the token before predicts the action
    return logits_AV.log_softmax(-1).gather(1, tokens_T[place_A, None]).squeeze(1)


# 5. Two losses.


def sft_loss(model: nn.Module, demonstrations: Sequence[ludus.Trajectory]) -> Tensor:
    """Imitation: the mean negative log-likelihood of the expert's tokens."""
    return -action_logprobs(model, demonstrations).mean()


def grpo_loss(model: nn.Module, groups: Sequence[ludus.Group]) -> Tensor:
    """Group-relative advantages, the clipped surrogate, and the mean over action tokens."""
    # an episode that failed through no fault of the model has no reward: it is in no baseline and in no loss
    played = [
        (g, t) for g, group in enumerate(groups) for t in group.trajectories if t.reward is not None
    ]
    trajectories = [trajectory for _, trajectory in played]
    lengths, _, action_T = packed(trajectories)
    trajectory_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    inputs = AdvantageInputs(
        rewards_N=torch.tensor([trajectory.reward for trajectory in trajectories]),
        group_N=torch.tensor([group for group, _ in played]),
        trajectory_T=trajectory_T,
        action_T=action_T,
    )
    advantages_T = grpo(inputs).advantages_T  # (r - mean) / std within the group, on each action token
    sampled_T = torch.tensor([p for t in trajectories for p in t.logprobs])  # as the engine saw them
    loss_A, _ = clipped_surrogate(
        LossInputs(
            logprobs_A=action_logprobs(model, trajectories),
            old_logprobs_A=sampled_T[action_T],
            advantages_A=advantages_T[action_T],
            row_A=trajectory_T[action_T],
        )
    )
    return (loss_A * by_token(trajectory_T, action_T)[action_T]).sum()


# 6. The loop.


def rollout(engine: Engine, tokenizer: Tokenizer, agent: ludus.Agent | None = None) -> Rollout:
    return Rollout(
        engine,
        Renderer(tokenizer, load_format("hermes")),
        Scorer([right]),
        LocalTools([assign]),
        agent=agent or ludus.Agent(),
        budgets=Budgets(max_turns=2, max_turn_tokens=24),
        attempts=1 if agent else ATTEMPTS,
    )


async def played(by: Rollout, tasks: Sequence[ludus.Task], seed: int) -> list[ludus.Group]:
    return [group async for group in by.groups(tasks, seed)]


def mean_reward(groups: Sequence[ludus.Group]) -> float:
    rewards = [t.reward for group in groups for t in group.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards)


async def main(steps: int = STEPS, warm_steps: int = WARM_STEPS) -> float:
    """Train, print, and return the success on held-out tickets."""
    # a tokenizer is fitted to what the expert's episodes look like; a pretrained model brings its own
    by_bytes = ByteTokenizer()
    shown = await played(rollout(FakeEngine([]), by_bytes, Demonstrator(expert)), TRAIN[::2], SEED)
    segments = [s for group in shown for t in group.trajectories for s in t.sequences[0].segments]
    texts = [by_bytes.decode(segment.tokens) for segment in segments]
    model, tokenizer = load_model(
        ModelConfig(scratch=ScratchConfig(layers=2, width=128), device="cpu"), SEED, texts
    )
    engine = EmbeddedEngine(model, tokenizer)  # samples this very module: weights are never copied
    policy, teacher = rollout(engine, tokenizer), rollout(engine, tokenizer, Demonstrator(expert))

    async def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        await engine.pause()  # nothing is in flight while the weights change
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        await engine.update_weights()  # drops the KV cache of the old weights
        await engine.resume()

    print(f"at the start          {mean_reward(await played(policy, HELD_OUT, SEED)):6.1%}")
    optimizer = torch.optim.AdamW(model.parameters(), WARM_RATE, betas=BETAS, weight_decay=0)
    demonstrations = [t for group in await played(teacher, TRAIN, SEED) for t in group.trajectories]
    for step in range(warm_steps):
        batch = random.Random(key(SEED, "sft", step)).sample(demonstrations, WARM_BATCH)
        await update(optimizer, sft_loss(model, batch))
    print(f"after the warm start  {mean_reward(await played(policy, HELD_OUT, SEED)):6.1%}")

    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=BETAS, weight_decay=0)
    for step in range(steps):
        tasks = random.Random(key(SEED, "rl", step)).sample(TRAIN, TASKS)
        groups = await played(policy, tasks, key(SEED, step))
        for start in range(MINI_BATCHES):  # from the second one on, importance ratios differ from 1
            await update(optimizer, grpo_loss(model, groups[start::MINI_BATCHES]))
        print(f"step {step + 1:3}  reward {mean_reward(groups):.3f}")
    final = mean_reward(await played(policy, HELD_OUT, SEED))
    print(f"after GRPO            {final:6.1%}")
    await engine.close()
    return final


if __name__ == "__main__":
    asyncio.run(main())
