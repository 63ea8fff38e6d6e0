"""Groups as trees: branches share exact tokens, KV and state, and cost only what is their own."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rollout_parts import attempt_of, called, play, renderer, rollout

from ludus import Env, Task, tool
from ludus.core import Group, InfraError, Segment, SegmentKind, StopReason, Trajectory
from ludus.core.failures import Boundary, ConfigError
from ludus.core.messages import ToolCall, ToolContext
from ludus.core.random import key
from ludus.core.trajectory import Branch, is_success
from ludus.envs import WORLDS, EnvPool
from ludus.envs.env import has_snapshots, reset_env
from ludus.observe import read_trajectories, rollout_metrics, write_trajectories
from ludus.remote.threads import run_sync
from ludus.rewards import reward
from ludus.rollouts.branching import EpisodeRecord, WorldState
from ludus.rollouts.tree import Leaf, Point, TreeConfig, choose_points, selections
from ludus.tools import as_toolset
from ludus.tools.library import build_toolset
from ludus.worlds.safe import Safe, found, opened
from ludus.worlds.safe import training_tasks as safe_tasks


class Shelf(Env):
    """Keeps what is put on it, and tells how much there is."""

    deterministic = True

    def __init__(self) -> None:
        self.things: list[str] = []

    def reset(self, task: Task) -> str:
        self.things = []
        return "an empty shelf"

    @tool
    def put(self, thing: str) -> str:
        """Put something there.

        Args:
            thing: What.
        """
        self.things.append(thing)
        return f"{len(self.things)} things, the last one is {thing}"


class CopiedShelf(Shelf):
    """The same with snapshots."""

    deterministic = False
    restored = 0

    async def snapshot(self) -> list[str]:
        return list(self.things)

    async def restore(self, state: list[str]) -> None:
        type(self).restored += 1
        self.things = list(state)


class MoodyShelf(Shelf):
    """Says that it is deterministic, and counts over all instances."""

    count = itertools.count()

    @tool
    def put(self, thing: str) -> str:
        """Put something there.

        Args:
            thing: What.
        """
        self.things.append(thing)
        return f"{next(self.count)} things"


@reward
def tidy(env: Shelf) -> float:
    """How many different things there are."""
    return float(len(set(env.things)))


def script(tokens: list[int], sampling: Any, session: str | None) -> str:
    """Put something five times, another thing in each attempt; then stop."""
    turn = renderer().tokenizer.decode(tokens).count("<tool_call>\n{")
    attempt = attempt_of(session)
    return called("put", thing=f"{attempt}.{turn}") if turn < 5 else "done"


def tree_rollout(env: type[Env] = CopiedShelf, said: Any = script, **settings: Any) -> Any:
    tree = TreeConfig.parse(settings.pop("tree", {}))
    pools = {"shelf": EnvPool(env, name="shelf", size=4)}
    given = {"attempts": 6, "rewards": [tidy], "budgets": {"max_turns": 6}, **settings}
    return rollout(said, pools=pools, tree=tree, **given)


def branches(group: Group) -> list[Trajectory]:
    return [one for one in group.trajectories if one.branch is not None and one.branch.segments]


def replayed_things(trajectory: Trajectory) -> list[str]:
    """What an independent walk over the recorded calls leaves on a shelf."""
    return [call.arguments["thing"] for call in trajectory.calls]


@pytest.mark.parametrize("branch", ["random", "entropy", "success", "beam"])
@pytest.mark.parametrize("env", [CopiedShelf, Shelf])
async def test_a_branch_is_what_an_independent_replay_gives(env: type[Shelf], branch: str) -> None:
    """Tokens, masks and log-probabilities are what the engine was given and gave, turn by turn."""
    playing = tree_rollout(env, tree={"branch": branch, "rounds": 2})
    (group,) = await play(playing)
    assert len(group.trajectories) == 6
    assert len(branches(group)) == 4
    answered = [
        (call.consumed, call.completion.tokens, call.completion.logprobs)
        for call in playing.engine.calls
    ]
    for one in group.trajectories:
        (sequence,) = one.sequences
        context: list[int] = []
        for segment in sequence.segments:
            if segment.kind is SegmentKind.ACTION:
                assert (tuple(context), segment.tokens, segment.logprobs) in answered
            context += segment.tokens
        # the environment was where the calls of the whole path had brought it
        assert one.reward == len(set(replayed_things(one))) == 5
        assert one.messages[0].content.endswith("an empty shelf")
        results = [message.content for message in one.messages if message.role == "tool"]
        said = [f"{i + 1} things, the last one is {t}" for i, t in enumerate(replayed_things(one))]
        assert all(text in result for text, result in zip(said, results, strict=True))
    sampled = {id(action) for one in group.trajectories for action in one.actions}
    assert len(sampled) == len(playing.engine.calls)  # nothing was sampled twice
    state = "fork" if env is CopiedShelf else "replay"
    assert {one.branch.state for one in branches(group) if one.branch} == {state}


async def test_shared_segments_are_the_parents_own() -> None:
    (group,) = await play(tree_rollout())
    for one in branches(group):
        assert one.branch is not None
        parent = next(t for t in group.trajectories if t.attempt == one.branch.attempt)
        shared = one.branch.segments
        own, theirs = one.sequences[0].segments, parent.sequences[0].segments
        assert all(own[i] is theirs[i] for i in range(shared))
        assert own[shared] is not theirs[shared]
        assert own[shared].kind is theirs[shared].kind is SegmentKind.ACTION
        assert all(a is b for a, b in zip(one.messages[:3], parent.messages[:3], strict=True))
        assert one.seed != parent.seed


async def test_the_kv_of_the_prefix_is_forked_and_everything_released() -> None:
    playing = tree_rollout()
    await play(playing)
    firsts = [
        min(
            (c for c in playing.engine.calls if attempt_of(c.session) == attempt),
            key=lambda c: len(c.consumed),
        )
        for attempt in range(2, 6)
    ]
    for call in firsts:  # all but the observation was in the session that was forked
        assert call.completion.cached_tokens > 0.5 * len(call.consumed)
    assert playing.engine.sessions == {}
    assert playing.pools["shelf"].stats.in_use == 0


async def test_forks_diverge_independently() -> None:
    """From one snapshot of a session: variables and files of one branch are not seen in another."""
    playing = rollout(
        _programs,
        tools=build_toolset(["python"]),
        attempts=4,
        tree=TreeConfig(roots=1),
        budgets={"max_turns": 4},
    )
    (group,) = await play(playing)
    assert [one.failure for one in group.trajectories] == [None] * 4
    assert {one.branch.state for one in branches(group) if one.branch} == {"fork"}
    for one in group.trajectories:
        said = [call.arguments["code"] for call in one.calls]
        variables: dict[str, Any] = {}
        for code in said:  # an interpreter of its own, with the same programs
            exec(code.split("open(")[0], variables)
        seen = one.messages[-2].content
        assert str(variables["x"]) in seen
        assert "".join(c.split("write('")[1][0] for c in said if "write('" in c) in seen


def _programs(tokens: list[int], sampling: Any, session: str | None) -> str:
    turn = renderer().tokenizer.decode(tokens).count("<tool_call>\n{")
    attempt = attempt_of(session)
    if turn == 0:
        return called("python", code="x = [0]")
    if turn < 3:
        put = f"x.append({10 * attempt + turn})\nopen('f', 'a').write('{attempt}')"
        return called("python", code=f"{put}\nprint(x, open('f').read())")
    return "done"


async def test_environments_in_processes_of_their_own_fork() -> None:
    pool = EnvPool(Safe, name="safe", size=2, isolation="process")
    task = safe_tasks()[0]
    try:
        one, other = [(await pool.acquire(name, task)).env for name in ("a", "b")]
        assert pool.has_snapshots
        assert has_snapshots(one)
        context = ToolContext("a", task, {"safe": one})
        dial, number = "red", task.envs["safe"]["combination"][0]
        call = ToolCall("turn", {"dial": dial, "to": number})
        await run_sync(one.call_tool, call, "a", task)
        state = await WorldState.of(as_toolset(()), context)
        await state.restore(as_toolset(()), ToolContext("b", task, {"safe": other}))
        assert await run_sync(lambda: other.found) == {"red"}
    finally:
        await pool.close()


async def test_replay_detects_a_non_deterministic_environment() -> None:
    (group,) = await play(tree_rollout(MoodyShelf))
    states = [one.branch.state for one in group.trajectories if one.branch is not None]
    assert states == ["fresh"] * 4
    assert all(one.failure is None and one.reward == 5 for one in group.trajectories)
    metrics = rollout_metrics([group])
    assert metrics["tree/fresh"] == 4
    assert metrics["tree/branches"] == metrics["tree/tokens_saved"] == 0


async def test_an_environment_that_can_do_neither_is_refused() -> None:
    class Plain(Shelf):
        deterministic = False

    with pytest.raises(ConfigError, match=r"agent\.pools\.shelf\.deterministic"):
        await play(tree_rollout(Plain))


async def test_a_lost_branch_is_typed_and_the_others_go_on() -> None:
    def failing(tokens: list[int], sampling: Any, session: str | None) -> str:
        if attempt_of(session) == 3:
            raise InfraError(Boundary.ENGINE, "gone")
        return script(tokens, sampling, session)

    (group,) = await play(tree_rollout(said=failing))
    assert [one.attempt for one in group.trajectories if one.failure is not None] == [3]
    assert len(group.trainable) == 5
    assert group.trajectories[3].reward is None


async def test_a_branch_is_played_again_from_its_turn() -> None:
    tries: Counter[int] = Counter()

    def flaky(tokens: list[int], sampling: Any, session: str | None) -> str:
        attempt = attempt_of(session)
        tries[attempt] += 1
        if attempt == 4 and tries[attempt] == 2:
            raise InfraError(Boundary.ENGINE, "gone")
        return script(tokens, sampling, session)

    playing = tree_rollout(said=flaky, tree={"branch": "random"})
    (group,) = await play(playing)
    assert len(group.trainable) == 6
    assert group.trajectories[4].branch is not None
    assert group.trajectories[4].reward == 5


async def test_limits_count_shared_tokens_once() -> None:
    """The budget of a group is what it samples, and a budget of calls likewise."""
    (whole,) = await play(tree_rollout(attempts=12, tree={"rounds": 5}))
    tokens = {id(a): len(a.tokens) for one in whole.trajectories for a in one.actions}
    limit = sum(tokens.values()) * 3 // 4
    (half,) = await play(tree_rollout(attempts=12, tree={"rounds": 5, "max_tokens": limit}))
    spent = sum({id(a): len(a.tokens) for one in half.trajectories for a in one.actions}.values())
    flat = limit // max(sum(len(a.tokens) for a in one.actions) for one in half.trajectories)
    assert flat < len(half.trajectories) < 12
    longest = max(sum(len(a.tokens) for a in one.actions) for one in half.trajectories)
    assert spent <= limit + 3 * longest  # a round that has begun is played to its end
    (few,) = await play(tree_rollout(attempts=12, tree={"rounds": 5, "max_calls": 11}))
    assert len(few.trajectories) < 6


async def test_trees_are_the_same_each_time() -> None:
    first, again = [(await play(tree_rollout(tree={"branch": "entropy"}), seed=7))[0] for _ in range(2)]
    assert [one.tokens for one in first.trajectories] == [one.tokens for one in again.trajectories]
    assert [one.branch for one in first.trajectories] == [one.branch for one in again.trajectories]


async def test_single_turn_groups_are_flat() -> None:
    (group,) = await play(tree_rollout(said=lambda *_: "done"))
    assert [one.branch for one in group.trajectories] == [None] * 6


def leaf(number: int, uncertain: list[float], reward: float) -> Leaf:
    one = Trajectory(Task.of("Go."), attempt=number, stop=StopReason.ANSWERED, reward=reward)
    segments = one.sequences[0].segments
    for value in uncertain:
        segments += [
            Segment(SegmentKind.OBSERVATION, [1]),
            Segment(SegmentKind.ACTION, [2, 3], [-value, -value]),
        ]
    return Leaf(one, EpisodeRecord(called=[0] * len(uncertain)))


def test_entropy_takes_the_least_certain_turns_and_moves_on() -> None:
    leaves = [leaf(0, [9.0, 1.0, 3.0], 0.0), leaf(1, [9.0, 2.0], 1.0)]
    config = TreeConfig(branch="entropy", penalty=1.5)
    taken: Counter[Point] = Counter()
    order = []
    for _ in range(4):
        (point,) = choose_points(config, leaves, taken, 1, 0)
        assert point is not None
        taken[point] += 1
        order.append((point.leaf, point.turn))
    # 3, then 2 before 3 - 1.5, then 1.5, then 1; first turns (the prompt) are never chosen
    assert order == [(0, 2), (1, 1), (0, 2), (0, 1)]


def test_success_and_beam_choose_by_reward() -> None:
    leaves = [leaf(0, [1.0] * 4, 0.0), leaf(1, [1.0] * 4, 1.0), leaf(2, [1.0] * 4, 0.5)]
    for draw in range(5):
        chosen = choose_points(TreeConfig(branch="success"), leaves, Counter(), 3, draw)
        assert {point.leaf for point in chosen if point} == {1}
        best = choose_points(TreeConfig(branch="beam", beam=2), leaves, Counter(), 4, draw)
        assert [(point.leaf, point.turn) for point in best if point] == [(1, 3), (1, 2)] * 2


def test_random_points_are_spread_over_all_turns() -> None:
    leaves = [leaf(0, [1.0] * 4, 0.0), leaf(1, [1.0] * 3, 1.0)]
    drawn = Counter(
        choose_points(TreeConfig(), leaves, Counter(), 1, key("t", i))[0] for i in range(500)
    )
    assert set(drawn) == {Point(0, 1), Point(0, 2), Point(0, 3), Point(1, 1), Point(1, 2)}
    assert min(drawn.values()) > 60


@pytest.mark.parametrize("name", ["safe", "textcraft", "babyai"])
async def test_prebuilt_environments_fork(name: str) -> None:
    """A restored instance goes on like the one that was copied, and neither changes the other's state."""
    world = WORLDS[name]
    if world.missing():
        pytest.skip(f"needs {world.missing()}")
    task = max(world.tasks("train")[:40], key=lambda one: len(list(_moves(world.expert, one))))

    async def act(env: Any, call: ToolCall) -> Any:
        did = await getattr(env, call.name)(**call.arguments)
        return (
            getattr(did, "content", None) or getattr(did, "observation", did),
            getattr(env, "won", getattr(env, "opened", None)),
        )

    made: list[Any] = []
    for _ in range(3):
        env: Any = world.factory()
        await reset_env(env, task, name)
        made.append(env)
    first, second, third = made
    moves = list(_moves(world.expert, task))
    middle = len(moves) // 2
    for call in moves[:middle]:
        await act(first, call)
    state = await first.snapshot()
    rest = [await act(first, call) for call in moves[middle:]]
    await second.restore(state)  # what the first did afterwards is not in it
    assert [await act(second, call) for call in moves[middle:]] == rest
    await third.restore(state)
    assert [await act(third, call) for call in moves[middle:]] == rest
    assert rest[-1][1]


def _moves(expert: Any, task: Task) -> Any:
    """The expert's calls, played in an environment of their own."""
    name = next(iter(task.envs))
    env: Any = WORLDS[name].factory()
    made = env.reset(task, **task.envs[name])
    if inspect.iscoroutine(made):
        _run(made)
    moves = expert(task)
    call = next(moves)
    while True:
        yield call
        did = _run(getattr(env, call.name)(**call.arguments))
        try:
            call = moves.send(did if isinstance(did, str) else str(getattr(did, "observation", did)))
        except StopIteration:
            return


def _run(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


# Search over turns


def guesses(tokens: list[int], sampling: Any, session: str | None) -> str:
    """A policy without a plan: some dial to some number, and now and then the door."""
    draw = Random(f"{session}/{len(tokens)}")
    if draw.random() < 0.1:
        return called("open")
    return called("turn", dial=draw.choice(["red", "green", "blue"]), to=draw.randrange(10))


def safes(tree: dict[str, Any] | None, attempts: int = 8, env: type[Env] = Safe, **settings: Any) -> Any:
    pools = {"safe": EnvPool(env, name="safe", size=16)}
    given = {"attempts": attempts, "rewards": [opened, found], "budgets": {"max_turns": 12}, **settings}
    if tree is not None:
        given["tree"] = TreeConfig.parse({"branch": "turns", **tree})
    return rollout(guesses, pools=pools, **given)


SAFES = [
    Task.of("Open the safe.", id=f"safe{n}", envs={"safe": {"combination": [n % 10, (3 * n) % 10, 7]}})
    for n in range(6)
]


class ReplayedSafe(Safe):
    """Can be replayed, and not be forked."""

    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


def sampled_tokens(groups: list[Group]) -> int:
    actions = {id(a): a for g in groups for one in g.trajectories for a in one.actions}
    return sum(len(one.tokens) for one in actions.values())


async def test_turn_search_finds_more_with_the_same_tokens() -> None:
    """A state and a step score (dials found): at the tokens of 16 plain attempts, more safes are opened."""
    plain = [group async for group in safes(None, attempts=16).groups(SAFES, seed=3)]
    budget = sampled_tokens(plain) // len(SAFES)
    tree = {"beam": 1, "candidates": 12, "max_tokens": budget}
    searched = [group async for group in safes(tree).groups(SAFES, seed=3)]
    assert sampled_tokens(searched) <= sampled_tokens(plain)

    def solved(groups: list[Group]) -> int:
        return sum(any(is_success(one) for one in group.trajectories) for group in groups)

    assert solved(searched) >= solved(plain) + 3, (solved(searched), solved(plain))


@pytest.mark.parametrize("env", [Safe, ReplayedSafe])
async def test_candidates_at_a_turn_are_exact_and_share_what_they_share(
    env: type[Env], tmp_path: Path
) -> None:
    playing = safes({"beam": 2, "candidates": 3}, env=env)
    (group,) = [group async for group in playing.groups(SAFES[:1], seed=1)]
    answered = [
        (call.consumed, call.completion.tokens, call.completion.logprobs)
        for call in playing.engine.calls
    ]
    by_attempt = {one.attempt: one for one in group.trajectories}
    assert len(by_attempt) == len(playing.engine.calls), "one action for each candidate"
    for one in group.trajectories:
        context: list[int] = []
        for segment in one.sequences[0].segments:
            if segment.kind is SegmentKind.ACTION:
                assert (tuple(context), segment.tokens, segment.logprobs) in answered
            context += segment.tokens
        if one.branch is not None:
            parent = by_attempt[one.branch.attempt]
            shared = one.sequences[0].segments[: one.branch.segments]
            assert len(shared) == len(parent.sequences[0].segments), (
                "it goes on where the other was held"
            )
            assert all(a is b for a, b in zip(shared, parent.sequences[0].segments, strict=True))
            assert one.branch.state == ("fork" if env is Safe else "replay")
    # the environment was where the path's calls had brought it: a safe of one's own says the same
    for one in group.trajectories:
        clicks = [m.content for m in one.messages if m.role == "tool" and m.content == "click"]
        combination = SAFES[0].envs["safe"]["combination"]
        numbers = dict(zip(("red", "green", "blue"), combination, strict=True))
        turned = [call.arguments for call in one.calls if call.name == "turn"]
        assert len(clicks) == sum(call["to"] == numbers[call["dial"]] for call in turned)
    finished = [one for one in group.trajectories if one.is_trainable]
    held = [one for one in group.trajectories if "search/score" in one.counts]
    assert finished and held and len(finished) + len(held) == len(group.trajectories)
    assert all(one.stop is StopReason.ABORTED and one.reward is None for one in held)
    assert not playing.engine.sessions, "everything is released"
    # the best prefix was gone on from at each turn
    for turns in range(1, max(one.turns for one in held) + 1):
        level = [one for one in held if one.turns == turns]
        gone_on = {one.branch.attempt for one in group.trajectories if one.branch is not None}
        best = max((one.counts["search/score"] for one in level), default=0)
        kept = [one.counts["search/score"] for one in level if one.attempt in gone_on]
        assert not kept or max(kept) == best
    write_trajectories(tmp_path / "group.parquet", group.trajectories)
    back = {one.attempt: one for one in read_trajectories(tmp_path / "group.parquet")}
    for one in group.trajectories:
        assert back[one.attempt].tokens == one.tokens and back[one.attempt].logprobs == one.logprobs
        assert back[one.attempt].counts.get("search/score") == one.counts.get("search/score")
    stored = {id(s) for one in back.values() for s in one.sequences[0].segments}
    assert stored == {id(s) for one in back.values() for s in one.own_segments}, "prefixes once"


async def test_turn_search_by_one_reward_and_with_process_rewards() -> None:
    """What is kept is what the named reward likes; an action's process reward counts once."""

    @reward(name="red", per_turn=True)
    def likes_red(trajectory: Trajectory) -> list[float | None]:
        return [
            float(any(c.arguments.get("dial") == "red" for c in a.calls)) for a in trajectory.actions
        ]

    playing = safes({"beam": 1, "candidates": 8, "score": "red"}, rewards=[opened, likes_red])
    (group,) = [group async for group in playing.groups(SAFES[:1], seed=2)]
    for one in group.trajectories:
        for action in one.actions:
            assert action.reward == float(any(c.arguments.get("dial") == "red" for c in action.calls))
    (leaf,) = [one for one in group.trajectories if one.is_trainable][:1]
    assert leaf.rewards["red"] >= leaf.turns - 2, "nearly every turn is red"
    with pytest.raises(ConfigError, match="no reward is called 'blue'; there are: total, success, red"):
        async for _ in safes({"score": "blue"}, rewards=[opened, likes_red]).groups(SAFES[:1], seed=2):
            pass


async def test_process_rewards_of_shared_actions_count_once_in_any_tree() -> None:
    @reward(per_turn=True)
    def one_each(trajectory: Trajectory) -> list[float | None]:
        return [1.0] * trajectory.turns

    (group,) = await play(tree_rollout(rewards=[one_each], tree={"rounds": 3}))
    assert branches(group)
    for one in group.trajectories:
        assert [action.reward for action in one.actions] == [1.0] * one.turns
        assert one.reward == one.turns == one.rewards["one_each"]


def test_siblings_tell_what_a_turn_search_has_gained() -> None:
    """Two flips, each the best of three: what is kept has more than the policy's mean of 1, and how much."""
    draw = Random(5)
    kept, corrected = [], []
    for _ in range(4000):
        trajectories: list[Trajectory] = []
        path, total = None, 0.0
        for depth in range(2):
            level = []
            for _ in range(3):
                branch = None if path is None else Branch(path, 2 * depth)
                one = Trajectory(Task("t"), attempt=len(trajectories) + len(level), branch=branch)
                one.counts["search/score"] = total + float(draw.random() < 0.5)
                level.append(one)
            best = max(level, key=lambda one: one.counts["search/score"])
            path, total = best.attempt, best.counts["search/score"]
            trajectories += level
        leaf = trajectories[path or 0]
        leaf.stop, leaf.reward = StopReason.ANSWERED, leaf.counts.pop("search/score")
        kept.append(leaf.reward)
        corrected.append(leaf.reward - selections(trajectories)[leaf.attempt].gain)
    assert sum(kept) / len(kept) == pytest.approx(2 * (1 - 0.5**3), abs=0.03)
    assert sum(corrected) / len(corrected) == pytest.approx(1.0, abs=0.03)
