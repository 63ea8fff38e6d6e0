"""Checkpoints, and going on from them: from which one, by which recipe, and what of it may change.

A checkpoint is the model in Hugging Face format, or its adapter in peft's; and what the next step needs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from safetensors import SafetensorError
from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.model import images_of
from ludus.observe import Checkpoint, JsonLinesSink, RunFolder, RunWriter, read_notes
from ludus.rewards import Scorer
from ludus.training.config.parts import KEYS
from ludus.training.config.recipe import Recipe, with_absolute_paths
from ludus.training.config.stages import SFTConfig
from ludus.training.early_end import EXTENDED
from ludus.training.ledger import GroupState
from ludus.training.models.sharded import save_policy
from ludus.training.optim.shard_files import UnsavedError

if TYPE_CHECKING:
    from ludus.training.run_context import RunContext

STAGE = "stage.json"
REWARDS = "rewards.json"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come: steps in all, the stage it is in, and the steps of that stage that are done."""

    step: int = 0
    stage: int = 0
    done: int = 0


class Saves(Protocol):
    """Something with a state of its own in a checkpoint."""

    def save(self, folder: Path) -> None: ...


def save_model(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write a model and its tokenizer as Hugging Face's libraries read them; of an adapted one, the adapter."""
    with unsaved_at(folder):
        save_policy(folder, model)
    save_tokenizer(folder, model, tokenizer)


def save_tokenizer(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write what turns text and images into what a model reads."""
    try:
        tokenizer.inner.save_pretrained(folder)
        if (images := images_of(model)) is not None:
            images.save(folder)
    except Exception as error:  # the library knows no narrower kind, for a full disk either
        raise UnsavedError(f"the tokenizer could not be written to {folder.parent}: {error}") from error


@contextmanager
def unsaved_at(folder: Path) -> Iterator[None]:
    """Context of writing weights: adds the folder to an error of the library."""
    try:
        yield
    except SafetensorError as error:
        raise UnsavedError(f"the model could not be written to {folder.parent}: {error}") from error


def save_checkpoint(
    run: RunWriter, progress: RunProgress, context: RunContext, stage: Saves, rewards: str
) -> None:
    """Write everything that going on needs; the folder appears whole or not at all."""
    with run.checkpoint(progress.step) as folder:
        context.save_policy(folder)
        stage.save(folder)
        (folder / REWARDS).write_text(rewards, encoding="utf-8")
        (folder / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_progress(folder: Path) -> RunProgress:
    return RunProgress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))


def load_rewards(folder: Path, scorers: Mapping[str, Scorer]) -> None:
    """Put the rewards that remember something where the checkpoint left them."""
    state = json.loads((folder / REWARDS).read_text(encoding="utf-8"))
    for name, scorer in scorers.items():
        scorer.load_state_dict(state[name])


def save_state(folder: Path, state: Json) -> None:
    """Write what of a stage is not in tensors."""
    (folder / STAGE).write_text(json.dumps(state), encoding="utf-8")


def load_state(folder: Path) -> Json:
    state: Json = json.loads((folder / STAGE).read_text(encoding="utf-8"))
    return state


log = logging.getLogger(__name__)


def checkpoint_to_resume(run: RunWriter, recipe: Recipe) -> Checkpoint | None:
    checkpoint = run.latest_checkpoint(thorough=True)
    if checkpoint is None and any(run.checkpoints_path.glob("step-*")):
        raise ConfigError(
            f"every checkpoint in {run.checkpoints_path} is damaged (the log says how), so there is nothing to "
            "go on from: put back what they were, or begin a new run"
        )
    first = recipe.stages[0]  # only imitation begins without a checkpoint
    unsaved = 0 if first.saves_at_start else min(first.total_steps, recipe.run.checkpoint_every)
    if checkpoint is None and max((row.get("step", 0) for row in run.metrics()), default=0) > unsaved:
        raise ConfigError(
            f"{run.path} has recorded steps and has no checkpoint of them in {run.checkpoints_path.name}, so "
            "there is nothing to go on from: put the folder back, or begin a new run"
        )
    return checkpoint


def going_on_text(run: RunWriter, recipe: Recipe, checkpoint: Checkpoint | None) -> str:
    """From where a run goes on, and what is played again; asked before what came later is dropped."""
    at, total = checkpoint.step if checkpoint else 0, recipe.stage_spans[-1][2]
    where = f"after step {at} of {total}, from {checkpoint.path}" if checkpoint else "from the beginning"
    last = max((row["step"] for row in run.metrics()), default=0)
    files = [one for one in run.trajectory_files() if one.step > at and one.split == "train"]
    in_flight, kept = _groups_under_way(checkpoint)
    groups = in_flight or sum(len(read_notes(one.path)) for one in files)
    again = [f"step {last}" if last == at + 1 else f"steps {at + 1} to {last}"] if last > at else []
    again += [f"{groups} groups"] if groups else []
    text = f"going on {where}; played again: {', '.join(again) or 'nothing that was recorded'}"
    return f"{text}; kept for later steps: {kept} finished groups" if kept else text


def _groups_under_way(checkpoint: Checkpoint | None) -> tuple[int, int]:
    """The groups that were in flight at a checkpoint, and those that were finished and not trained."""
    if checkpoint is None or not (checkpoint.path / STAGE).is_file():
        return 0, 0
    rollouts = load_state(checkpoint.path).get("rollouts") or {"ledger": {"entries": []}}
    states = [one["state"] for one in rollouts["ledger"]["entries"]]
    in_flight = states.count(GroupState.TO_PLAY)
    return in_flight, len(states) - in_flight


def resumed_recipe(run: RunWriter, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run goes on by: its own, with its last stage made longer where that is asked for."""
    where = f"{run.path}/recipe.json"
    raw, objects = run.recipe(), run.objects()
    before = Recipe.parse(raw, where)
    full = Recipe.parse(with_absolute_paths(raw), where)

    def changes(override: str) -> bool:
        """Whether the recipe would be another one: the command that began a run may be given again."""
        key = override.partition("=")[0].strip()
        if key in {KEYS.get(name, name) for name in objects}:
            return True  # what the recipe has of an object is no more than its name
        try:
            return Recipe.parse(with_absolute_paths(apply_overrides(raw, [override])), where) != full
        except ConfigError:
            return True  # not by itself, or not at all: all of them together tell

    overrides = [one for one in overrides if changes(one)]
    if not overrides:
        return before
    changed = apply_overrides(raw, overrides)
    recipe = Recipe.parse(changed, where)
    latest = run.latest_checkpoint()
    done = load_progress(latest.path) if latest is not None else None
    keys = [one.partition("=")[0].strip() for one in overrides]
    missing = {name: what for name, what in objects.items() if KEYS.get(name, name) not in keys}
    rebuilt = {KEYS.get(name, name) for name in objects if name not in missing}  # by reference now
    check_extension(recipe, [key for key in keys if key not in rebuilt], done, before)
    optimizer = recipe.stages[-1].optimizers.get("optimizer")
    if optimizer is not None and optimizer.schedule != "constant":
        log.warning(
            "the learning rate's schedule (%s) is over all steps of a stage: with more of them it is another "
            "one from here on",
            optimizer.schedule,
        )
    if done is not None and recipe.stages[-1] != before.stages[-1]:  # which differ in length alone
        with closing(JsonLinesSink(run.metrics_path)) as rows:
            rows.write(done.step, {EXTENDED: 1.0})
    run.replace_recipe(with_absolute_paths(changed))
    if rebuilt:
        run.note_objects(missing)
    return recipe


def length_key(recipe: Recipe) -> str | None:
    """The key that says how long the last stage is, such as rl.steps; None where it does not learn."""
    where, last = recipe.named_stages[-1]
    return f"{where}.{last.length_key}" if last.length_key is not None else None


def check_extension(
    recipe: Recipe, changed: Sequence[str], done: RunProgress | None, before: Recipe
) -> None:
    """Refuse what a resumed run cannot change: all but how long its last stage is, and what is written down.

    `changed` are the keys, as on the command line; `done` is how far the run has come; `before` is its recipe
    as it was.
    """
    length = length_key(before)
    for key in changed:
        noted = key.startswith(("run.", "evaluation.", "cluster.")) and key != "run.folder"
        if key != length and not noted:
            raise ConfigError(
                "a resumed run goes on by its own recipe, and "
                f"{key} cannot be changed; what can be: {f'{length}, ' if length else ''}"
                f"evaluation.*, run.* and cluster.*. {_OTHERWISE}"
            )
    where, last = recipe.named_stages[-1]
    if isinstance(last, SFTConfig) and last.epochs is not None:  # its steps depend on the data
        earlier = before.stages[-1]
        assert isinstance(earlier, SFTConfig)
        if earlier.epochs is not None and last.epochs < earlier.epochs:
            raise ConfigError(f"{length} can only be raised: it is {earlier.epochs:g}")
        return
    if done is not None and done.stage == len(recipe.stages) - 1 and last.total_steps < done.done:
        raise ConfigError(
            f"{where} has done {done.done} steps already, so its length cannot be {last.total_steps}"
        )


_OTHERWISE = (
    "To train otherwise, begin a new run whose model is the last checkpoint's folder "
    "(model.name=RUN/checkpoints/step-...)"
)


def finished_text(recipe: Recipe, counted: Recipe, done: RunProgress | None, run: str) -> str | None:
    """Text for a run that has done all its steps; None for any other.

    `counted` is the recipe with steps where it says epochs.
    """
    if done is None or done.step < sum(stage.total_steps for stage in counted.stages):
        return None
    text, longer = f"{run} is finished: all {done.step} steps are done.", longer_command(recipe, run)
    if longer is None:
        return f"{text} Its last stage is an evaluation, so it cannot be extended. {_OTHERWISE}"
    return f"{text} To extend it, raise the length of its last stage: {longer}"


def longer_command(recipe: Recipe, run: str) -> str | None:
    """The command that makes a finished run twice as long in its last stage; None where that does not learn."""
    key = length_key(recipe)
    if key is None:
        return None
    longer = 2 * getattr(recipe.stages[-1], key.rpartition(".")[2])
    return f"ludus train --resume {run} {key}={longer}"


def replayed_recipe(run: RunFolder, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run that trains from the record of another, in a folder of its own."""
    raw = run.recipe()
    raw["name"] = f"{raw.get('name', 'run')}-replay"
    raw["run"] = {**raw.get("run", {}), "folder": None, "replay": str(run.path.absolute())}
    return Recipe.parse(apply_overrides(raw, overrides), f"{run.path}/recipe.json")
