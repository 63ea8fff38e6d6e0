"""A trained model for other programs: weights, tokenizer, generation settings, chat template, model card.

The folder needs no Ludus: transformers, vLLM and llama.cpp load it, and its chat template
(`chat.portable_template`) prompts the model as it was trained. The run's own episodes are the proof: what the
template makes of their messages is compared with the tokens that the model has read.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from ludus.chat.api_fields import ApiError, parse_tools
from ludus.chat.chat_template import tools_key
from ludus.chat.portable_template import as_request, portable_template
from ludus.chat.renderer import Renderer
from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.messages import ToolSpec
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.model import context_limit, unwrapped
from ludus.observe import RunFolder, atomic_directory, plot_curve, read_regular
from ludus.sandbox import close_shared_sandboxes
from ludus.training.checkpoint import load_progress, save_model
from ludus.training.config.parts import Parts, resolve_named
from ludus.training.config.recipe import Recipe
from ludus.training.config.run import ModelConfig
from ludus.training.export.publish import CardFacts, model_card
from ludus.training.models.gguf import SHORT_NAMES
from ludus.training.models.loading import load_model, source_of
from ludus.training.models.lora import base_of, is_adapter, revision_of
from ludus.training.placement import WrittenPolicy, write_policy
from ludus.training.report import held_out_table
from ludus.training.task_sets import build_task_sets, close_task_sets, tool_specs

FACTS = "ludus_export.json"
_EPISODES = 8
"""How many recorded episodes the template is compared with."""


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What a server has to know of an exported model, beside what Hugging Face's files say."""

    name: str
    format: str
    """The action format in which it writes calls."""
    stops: tuple[str, ...] = ()
    """Strings that ended its turns in training."""
    dtype: str = "auto"
    context: int | None = None
    is_adapter: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """How many prompts of recorded episodes the chat template writes token for token."""

    first: int = 0
    first_same: int = 0
    later: int = 0
    later_same: int = 0

    def __str__(self) -> str:
        if not self.first:
            return "no recorded episode was there to compare with"
        text = f"{self.first_same} of {self.first} first prompts"
        return f"{text} and {self.later_same} of {self.later} later ones" if self.later else text


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model."""

    folder: Path
    facts: ExportFacts
    compared: Compared
    notes: list[str]
    """What a chat template cannot say, or users have to do themselves."""


def export_model(
    run: RunFolder,
    checkpoint: Path,
    folder: Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
) -> Exported:
    """Write a checkpoint of a run as a model for other programs; the folder appears whole or not at all.

    Args:
        adapter: The adapter alone, which is merged into its base otherwise.
        dtype: Number format of the weights; as in the checkpoint, or its base, when left out.
    """
    recipe = Recipe.parse(run.recipe(), f"{run.path}/recipe.json")
    if folder.exists():
        raise ConfigError(f"{folder} is already there: choose another folder (--out), or remove it")
    if adapter and not is_adapter(checkpoint):
        raise ConfigError(f"{checkpoint} is a whole model and no adapter: leave out --adapter")
    base = named_base(str(checkpoint) if is_adapter(checkpoint) else recipe.model.name)
    step = load_progress(checkpoint).step
    own = recipe.model.model_dump() | {"name": str(checkpoint), "scratch": None, "lora": None}
    own |= {"device": "cpu", "dtype": dtype or _dtype(checkpoint, recipe.model)}
    model, tokenizer = load_model(ModelConfig.parse(own, f"{run.path}/recipe.json"), seed=0)
    renderer, tools, objects = asyncio.run(_prompting(recipe, run, tokenizer))
    template = portable_template(renderer, tokenizer, tools, system=recipe.agent.system)
    compared = compare(run, tokenizer, template, renderer, tools)
    notes = []
    if not tools and (read := tools_in_prompts(run, tokenizer)):
        listed = portable_template(renderer, tokenizer, [read], system=recipe.agent.system)
        with_read = compare(run, tokenizer, listed, renderer, [read])
        if with_read.first_same:  # the proof that they are its tools, in these words
            template, compared, tools, objects = listed, with_read, [read], []
            notes.append(
                "the recipe does not name its tools: they are those that its recorded prompts list"
            )
    if objects:
        notes.append(
            f"the run was made in Python, and its {', '.join(objects)} are objects of that program: the "
            "template does not know its tools, so give `tools` with every request"
        )
    notes += _notes(recipe, renderer, tools, compared)
    if adapter and Path(base_of(checkpoint)).exists():
        notes.append(
            "its base is a folder of this machine, which others need: without --adapter it is merged"
        )
    tokenizer.inner.chat_template = template
    _set_generation(model, tokenizer, recipe)
    with atomic_directory(folder) as temporary:
        own_base = _public_name(base_of(checkpoint)) if adapter else None
        written = _write_model(temporary, model, tokenizer, own_base)
        (temporary / "chat_template.jinja").write_text(template, encoding="utf-8")
        plot_curve(temporary / "curve.png", run.metrics(), title=recipe.name)
        facts = ExportFacts(
            name=f"{recipe.name}-step-{step}",
            format=renderer.format.name,
            stops=renderer.bound(_union(tools)).format.stops,
            dtype=written.dtype,
            context=written.context,
            is_adapter=adapter,
        )
        (temporary / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
        shown = CardFacts(
            name=facts.name,
            recipe=recipe,
            step=step,
            base=base,
            is_adapter=adapter,
            held_out=held_out_table(run, recipe),
            tools=_union(tools),
            format=facts.format,
            compared=str(compared),
            notes=notes,
            stops=facts.stops,
        )
        (temporary / "README.md").write_text(model_card(shown), encoding="utf-8")
    return Exported(folder, facts, compared, notes)


def _write_model(
    folder: Path, model: nn.Module, tokenizer: HFTokenizer, base: str | None
) -> WrittenPolicy:
    """Write weights, tokenizer and settings; where `base` is named, of the adapter alone that is for it."""
    if base is None:
        return write_policy(model, tokenizer, folder)
    adapted: Any = model
    adapted.peft_config["default"].base_model_name_or_path = base
    save_model(folder, model, tokenizer)
    inner: Any = unwrapped(model)
    inner.generation_config.save_pretrained(folder)
    dtype = str(inner.dtype).removeprefix("torch.")
    return WrittenPolicy(folder, dtype, context_limit(model), on_cpu=True)


def exported_facts(folder: Path) -> ExportFacts | None:
    """What is noted of an exported model; None where the folder is none."""
    if not (folder / FACTS).is_file():
        return None
    try:
        raw = json.loads(read_regular(folder / FACTS))
        return ExportFacts(**{**raw, "stops": tuple(raw["stops"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / FACTS} is damaged ({error}): export the model again") from None


def named_base(name: str | None) -> str | None:
    """The name by which others load the model that training began with; None for one made from scratch."""
    while name is not None:
        run = RunFolder(Path(name).parent.parent)
        if is_adapter(name):
            name = base_of(Path(name))
        elif Path(name).is_dir() and Path(name).parent == run.checkpoints_path and run.is_run:
            name = run.recipe().get("model", {}).get("name")
        else:
            return _public_name(name)
    return None


def _public_name(name: str) -> str:
    """A model's name on the hub in place of a short one."""
    short = SHORT_NAMES.get(name.lower())
    return name if short is None or Path(name).is_dir() else short.hub


def _dtype(checkpoint: Path, config: ModelConfig) -> str:
    """The number format of a checkpoint's weights, or of those that its adapter stands beside."""
    from transformers import AutoConfig

    place: str = str(checkpoint)
    if is_adapter(checkpoint):
        if config.dtype != "auto":
            return config.dtype
        place = source_of(base_of(checkpoint), revision_of(checkpoint))
    told: Any = AutoConfig.from_pretrained(place, trust_remote_code=config.trust_remote_code)
    found = str(told.dtype).removeprefix("torch.")
    return found if found in ("float32", "bfloat16") else "float32"


async def _prompting(
    recipe: Recipe, run: RunFolder, tokenizer: HFTokenizer
) -> tuple[Renderer, list[list[ToolSpec]], list[str]]:
    """The renderer that the run prompted with, its different lists of tools, and what was given as objects."""
    unknown = sorted({"tools", "envs", "rewards", "agent"} & run.objects().keys())
    if unknown:
        agent = recipe.agent.model_copy(update={"tools": (), "envs": {}})
        recipe = recipe.model_copy(update={"agent": agent, "rewards": (), "task_sets": ()})
    named = {"tools": recipe.agent.tools, "envs": recipe.agent.envs, "rewards": recipe.rewards}
    parts = Parts(**{name: resolve_named(name, name, one, recipe) for name, one in named.items() if one})
    sets = build_task_sets(recipe, parts, FakeEngine([]), tokenizer)
    try:
        lists = [await tool_specs(one.rollout) for one in sets]
    finally:
        await close_task_sets(sets)
        await close_shared_sandboxes()
    different = {tools_key(specs): specs for specs in lists if specs}
    return sets[0].rollout.renderer, list(different.values()), unknown


def _union(tools: Sequence[Sequence[ToolSpec]]) -> list[ToolSpec]:
    return list({spec.name: spec for specs in tools for spec in specs}.values())


def _set_generation(model: nn.Module, tokenizer: HFTokenizer, recipe: Recipe) -> None:
    """Draw as in training: a base's own settings (top_k = 20, ...) would change what was learned."""
    settings: Any = unwrapped(model).generation_config
    settings._from_model_config = False  # or transformers makes others of config.json
    settings.update(
        do_sample=True,
        temperature=recipe.sampling.temperature,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_new_tokens=recipe.budgets.max_turn_tokens,
        max_length=None,
        eos_token_id=list(tokenizer.stop_tokens),
        pad_token_id=tokenizer.inner.pad_token_id,
    )


# What the template makes of recorded episodes.


def compare(
    run: RunFolder,
    tokenizer: HFTokenizer,
    template: str,
    renderer: Renderer,
    tools: Sequence[Sequence[ToolSpec]],
) -> Compared:
    """Compare the template's prompts with those that recorded episodes were played with."""
    counts = {"first": 0, "first_same": 0, "later": 0, "later_same": 0}
    lists: list[Any] = (
        [[spec.as_openai() for spec in specs] for specs in tools] if len(tools) > 1 else [None]
    )
    for trajectory in islice(_comparable(run), _EPISODES):
        for place, (messages, read) in enumerate(_prompts(trajectory, renderer.bound(_union(tools)))):
            same = any(_rendered(tokenizer, template, messages, one) == read for one in lists)
            which = "first" if place == 0 else "later"
            counts[which] += 1
            counts[f"{which}_same"] += same
    return Compared(**counts)


def tools_in_prompts(run: RunFolder, tokenizer: HFTokenizer) -> list[ToolSpec]:
    """The tools that recorded prompts list as JSON, where all list the same ones."""
    prompts = [one.sequences[0].segments[0].tokens for one in islice(_comparable(run), _EPISODES)]
    found = [list(_listed_tools(tokenizer.decode(tokens))) for tokens in prompts]
    return found[0] if found and all(one == found[0] for one in found) else []


def _listed_tools(text: str) -> Iterator[ToolSpec]:
    decoder = json.JSONDecoder()
    for place in re.finditer(r'\{\s*"type"\s*:\s*"function"', text):
        try:
            yield from parse_tools([decoder.raw_decode(text, place.start())[0]])
        except (ValueError, RecursionError, ApiError):
            continue


def _comparable(run: RunFolder) -> Iterator[Trajectory]:
    """Recorded episodes of one sequence without images, the newest first."""
    for file in reversed(run.trajectory_files()):
        for one in run.trajectories(file.step, file.split):
            acts = sum(message.role == "assistant" for message in one.messages)
            plain = len(one.sequences) == 1 and acts == one.turns and one.branch is None
            if plain and one.turns and not any(message.media for message in one.messages):
                yield one


def _prompts(trajectory: Trajectory, renderer: Renderer) -> Iterator[tuple[list[Any], list[int]]]:
    """Before each action: the conversation as a client of a chat API sends it, and what the model had read."""
    sequence, read = trajectory.sequences[0], list[int]()
    acts = [place for place, one in enumerate(trajectory.messages) if one.role == "assistant"]
    ends = iter(acts)
    for segment in sequence.segments:
        if segment in sequence.actions:
            end = next(ends)
            yield [as_request(one, renderer.format) for one in trajectory.messages[:end]], list(read)
        read += segment.tokens


def _rendered(
    tokenizer: HFTokenizer, template: str, messages: Sequence[Any], tools: Any
) -> list[int] | None:
    from jinja2 import TemplateError

    try:
        found: list[int] = tokenizer.inner.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=False,
        )
    except TemplateError:
        return None
    return found


def _notes(
    recipe: Recipe, renderer: Renderer, tools: Sequence[Sequence[ToolSpec]], compared: Compared
) -> list[str]:
    """What users of the exported model have to know, because no chat template can say it."""
    found = []
    if len(tools) > 1:
        found.append("its task sets have different tools: give those of one of them with every request")
    if stops := renderer.bound(_union(tools)).format.stops:
        found.append(
            f"its turns ended at {', '.join(map(repr, stops))} in training: send them as `stop`, and keep "
            "them in the text (vLLM: `include_stop_str_in_output`)"
        )
    if renderer.turns == "inline":
        found.append(
            "it reads the results of tools inside its own turn (agent.turns = inline), which no chat template "
            "can write: this one refuses results. Use `ludus rollout` and `ludus eval`"
        )
    if recipe.agent.history == "keep" and not renderer.preserves_prefixes:
        found.append(
            "its own chat template rewrites earlier turns, which training left as they were (agent.history = "
            f"keep), so it reads another history there: {'; '.join(renderer.features.rewrites)}"
        )
    if recipe.budgets.remind:
        found.append(
            "in training each observation ended with how many turns were left, such as "
            f"`{recipe.budgets.reminder(1)}`: add that to the results that you send"
        )
    if compared.first and not compared.first_same:
        found.append(
            "no first prompt came out the same: the agent or its environment says more than the recipe, or "
            "its tools have changed since"
        )
    elif compared.later_same < compared.later:
        found.append(
            f"{compared.later - compared.later_same} of {compared.later} later prompts have other tokens: a "
            "chat API gets what the model wrote as text, which is encoded anew, and its calls are written in "
            "one way"
        )
    return found
