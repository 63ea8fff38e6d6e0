"""What is wrong with a table of settings, in words that name the key as the user writes it, and the fix.

Pydantic says where a problem is in its own terms: the branch of a union that was tried and the tag of a table
stand among the keys. `_follow` walks the models along such a place, and keeps what a user would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ludus.core.messages import Json

_KINDS = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
}
"""What a value must be, by the first word of pydantic's name for the problem."""
_WRONG_KIND = ("type", "parsing", "number", "size", "float", "attributes_type")


OTHER_FRAMEWORKS_KEYS = {
    "num_generations": "rl.attempts",
    "group_size": "rl.attempts",
    "n": "rl.attempts",
    "rollout_n": "rl.attempts",
    "num_samples": "rl.attempts",
    "n_samples_per_prompt": "rl.attempts",
    "rollouts_per_example": "rl.attempts",
    "batch_size": "rl.tasks",
    "train_batch_size": "rl.tasks",
    "rollout_batch_size": "rl.tasks",
    "per_device_train_batch_size": "rl.tasks",
    "gradient_accumulation_steps": "rl.optimizer.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "rl.optimizer.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "rl.optimizer.micro_batch_tokens",
    "ppo_mini_batch_size": "rl.updates",
    "num_iterations": "rl.epochs",
    "ppo_epochs": "rl.epochs",
    "num_train_epochs": "warm_start.epochs",
    "total_epochs": "rl.steps",
    "max_steps": "rl.steps",
    "total_training_steps": "rl.steps",
    "lr": "rl.optimizer.learning_rate",
    "learning_rate": "rl.optimizer.learning_rate",
    "lr_scheduler_type": "rl.optimizer.schedule",
    "warmup_steps": "rl.optimizer.warmup_steps",
    "weight_decay": "rl.optimizer.weight_decay",
    "max_grad_norm": "rl.optimizer.max_gradient_norm",
    "grad_clip": "rl.optimizer.max_gradient_norm",
    "gradient_checkpointing": "rl.optimizer.activation_memory",
    "beta": "rl.kl",
    "kl_coef": "rl.kl",
    "kl_loss_coef": "rl.kl",
    "entropy_coeff": "rl.entropy",
    "entropy_coef": "rl.entropy",
    "adv_estimator": "rl.algorithm",
    "advantage_estimator": "rl.algorithm",
    "loss_type": "rl.algorithm",
    "loss_agg_mode": "rl.aggregation",
    "scale_rewards": "rl.algorithm = dr_grpo",
    "epsilon": "rl.loss_options = { clip_low = 0.2 }",
    "clip_ratio": "rl.loss_options = { clip_low = 0.2, clip_high = 0.2 }",
    "clip_ratio_low": "rl.loss_options = { clip_low = 0.2 }",
    "epsilon_high": "rl.loss_options = { clip_high = 0.28 }",
    "clip_ratio_high": "rl.loss_options = { clip_high = 0.28 }",
    "gamma": "rl.options = { discount = 1.0 }",
    "lam": "rl.options = { lam = 0.95 }",
    "max_completion_length": "budgets.max_turn_tokens",
    "max_response_length": "budgets.max_turn_tokens",
    "max_new_tokens": "budgets.max_turn_tokens",
    "max_seq_length": "budgets.max_tokens",
    "max_length": "budgets.max_tokens",
    "max_model_len": "budgets.max_tokens",
    "max_assistant_turns": "budgets.max_turns",
    "temperature": "sampling.temperature",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "lora_target_modules": "model.lora.targets",
    "model_name_or_path": "model.name",
    "model_path": "model.name",
    "base_model": "model.name",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype = bfloat16",
    "gpu_memory_utilization": "engine.memory",
    "vllm_gpu_memory_utilization": "engine.memory",
    "max_num_seqs": "engine.max_running",
    "max_num_batched_tokens": "engine.tokens_per_step",
    "dataset": "tasks.train",
    "dataset_name": "tasks.train",
    "train_dataset": "tasks.train",
    "train_files": "tasks.train",
    "dataset_config": "tasks.train = dataset:NAME:CONFIG@SPLIT",
    "eval_dataset": "tasks.evaluation",
    "val_files": "tasks.evaluation",
    "prompt_key": "tasks.columns = { prompt = question }",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "reward_fn": "rewards",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint_every",
    "save_freq": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every",
    "report_to": "run.wandb",
}
"""What TRL, verl and others call a key of a recipe, and what it is called here."""


def problem_lines(model: type[BaseModel], problems: Iterable[Any]) -> list[str]:
    """A line for each key that has a problem: where, what, and what to do."""
    lines: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        where, text, given = _explain(model, dict(problem))
        lines.setdefault((where, given), []).append(text)
    return [
        f"  {where}: {_joined(texts)}{given}" if where else f"  {_joined(texts)}{given}"
        for (where, given), texts in lines.items()
    ]


def refuse_coercion(model: type[BaseModel], raw: Mapping[str, Any]) -> None:
    """Raise where a text stands for a number, or a truth does, or either for a truth.

    Pydantic would convert them. A recipe has kinds of its own for all three, so this is a mistake.
    """
    found: list[Any] = [
        {"type": kind, "loc": (name,), "input": raw[name]}
        for name, field in model.model_fields.items()
        if name in raw and (kind := _lookalike(field.annotation, raw[name]))
    ]
    if found:
        raise ValidationError.from_exception_data(model.__name__, found)


def _lookalike(annotation: Any, value: Any) -> str | None:
    """Pydantic's name for what is wrong with a value of the wrong kind; None when there is nothing wrong."""
    kinds = set(_kinds(annotation))
    is_plain = kinds <= {int, float, bool, type(None)}  # a union with others has a say of its own
    if not is_plain or type(value) in kinds or not isinstance(value, str | bool | int | float):
        return None
    if bool in kinds and not isinstance(value, bool):
        return "bool_type"
    if isinstance(value, str | bool) and kinds & {int, float}:
        return "int_type" if int in kinds else "float_type"
    return None


_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def type_mismatch(annotation: Any, value: Any) -> str | None:
    """What a value must be that would be taken for something else than it is; None where it would not.

    A text counts as true and a truth as a number; a number is no text, and a fraction no whole number. Whatever
    else there is, such as numpy's numbers, is for whoever takes it.
    """
    kinds = set(_kinds(annotation))
    named = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    plain = {kind for kind in kinds if get_origin(kind) is not Literal} - {type(None)}
    if not plain <= _SCALARS.keys() or type(value) not in (*_SCALARS, type(None)):
        return None
    fits: set[Any] = {type(value)}
    if type(value) is int or (type(value) is float and value.is_integer()):
        fits = {int, float}
    if fits & plain or type(value) in kinds or any(value == one for one in named):
        return None
    wanted = [*map(repr, named), *(words for kind, words in _SCALARS.items() if kind in plain)]
    return "must be " + ", or ".join(wanted)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _joined(texts: Sequence[str]) -> str:
    """One sentence: what each branch of a union wants is one way to be right."""
    first, *others = dict.fromkeys(texts)
    wants = all(text.startswith("must be ") for text in (first, *others))
    return ", or ".join([first, *(t.removeprefix("must be ") if wants else t for t in others)])


def _explain(model: type[BaseModel], problem: Json) -> tuple[str, str, str]:
    """(where, what, the value that was given, where that helps)."""
    kind, location, told = str(problem["type"]), list(problem["loc"]), problem.get("ctx") or {}
    given = f" (given: {problem['input']!r:.80})"
    if kind == "extra_forbidden":
        path, tables = _follow(model, location[:-1])
        return _dotted([*path, location[-1]]), _unknown(str(location[-1]), path, tables, model), ""
    path, _ = _follow(model, location)
    if kind == "value_error":  # one about the whole names its keys itself
        message = str(problem["msg"]).removeprefix("Value error, ")
        return _dotted(path), message.replace("\n", "\n  "), ""
    where = _dotted(path) or "(the whole)"
    if kind == "missing":
        return where, "must be given", ""
    if kind == "union_tag_not_found":
        tag = str(told["discriminator"]).strip("'")
        _, tables = _follow(model, location)
        return _dotted([*path, tag]), f"must be given: {_tags(tables)}", ""
    if kind == "union_tag_invalid":
        known = [tag.strip(" '") for tag in str(told["expected_tags"]).split(",")]
        near = get_close_matches(str(told["tag"]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        tag = str(told["discriminator"]).strip("'")
        text = f"must be one of {', '.join(map(repr, known))}{hint}"
        return _dotted([*path, tag]), text, f" (given: {told['tag']!r:.80})"
    return where, _wanted(kind, str(problem["msg"])), given


def _wanted(kind: str, message: str) -> str:
    first, _, rest = kind.partition("_")
    if first in _KINDS and (rest in _WRONG_KIND or rest.startswith("from_")):
        return f"must be {_KINDS[first]}"
    for theirs in ("Input should ", "String should ", "Tuple should ", "List should "):
        if message.startswith(theirs):
            return f"must {message.removeprefix(theirs)}"
    return f"{message[:1].lower()}{message[1:]}"


def _unknown(
    key: str, place: Sequence[Any], tables: Sequence[type[BaseModel]], whole: type[BaseModel]
) -> str:
    """What to write instead of a key of the table at `place`: one of another table is named in full."""
    known = sorted({name for table in tables for name in table.model_fields})
    ours = OTHER_FRAMEWORKS_KEYS.get(key.lower())
    if ours is not None and has_key([whole], ours):
        path, _, value = ours.partition(" = ")
        parts = path.split(".")
        # in this table or in one inside it, where that has it; then this table's key of that beginning
        inner = [".".join(parts[i:]) for i in range(len(parts)) if has_key(tables, ".".join(parts[i:]))]
        inner += [name for name in known if key.lower().startswith(f"{name}_")]
        path = _dotted([*place, inner[0]]) if inner else path
        return f"unknown key; did you mean {path + (f' = {value}' if value else '')!r}?"
    near = get_close_matches(key, known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return (
        f"unknown key; known keys: {', '.join(known)}" if known else "unknown key; there are none here"
    )


def has_key(tables: Sequence[type[BaseModel]], path: str) -> bool:
    """Whether a dotted key, with or without a value, can be set in one of these tables."""
    first, _, rest = path.partition(" = ")[0].partition(".")
    fields = [table.model_fields[first] for table in tables if first in table.model_fields]
    inner = [hint for field in fields for hint in _branches(field.annotation)]
    return bool(fields) and (not rest or has_key(_tables(inner), rest))


def _tags(tables: Sequence[type[BaseModel]]) -> str:
    return "one of " + ", ".join(repr(tag) for table in tables for tag in _tags_of(table))


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _follow(model: type[BaseModel], location: Sequence[Any]) -> tuple[list[Any], list[type[BaseModel]]]:
    """The place as a user writes it, and the tables that can stand there."""
    path: list[Any] = []
    here: list[Any] = [model]
    for part in location:
        tables = _tables(here)
        fields = [table.model_fields[part] for table in tables if part in table.model_fields]
        inner = [_inside(hint) for hint in here if get_origin(hint) in (tuple, list, dict)]
        if fields:
            path.append(part)
            here = [hint for field in fields for hint in _branches(field.annotation)]
        elif isinstance(part, str) and any(part in _tags_of(table) for table in tables):
            here = [table for table in tables if part in _tags_of(table)]  # the tag is no key
        elif inner and not (isinstance(part, str) and get_origin(here[0]) is not dict):
            path.append(part)
            here = [hint for one in inner for hint in _branches(one)]
        elif len(here) == 1:
            path.append(part)
        # else: the name of a union's branch, which is no key either
    return path, _tables(here)


def _tables(hints: Iterable[Any]) -> list[type[BaseModel]]:
    return [hint for hint in hints if isinstance(hint, type) and issubclass(hint, BaseModel)]


def _branches(hint: Any) -> list[Any]:
    """What a value may be: the members of a union, without None and without annotations."""
    if get_origin(hint) is Annotated:
        return _branches(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [b for one in get_args(hint) if one is not type(None) for b in _branches(one)]
    return [hint]


def _inside(hint: Any) -> Any:
    """What a list or a table of any keys holds."""
    arguments = [argument for argument in get_args(hint) if argument is not ...]
    return arguments[-1] if arguments else Any


def _tags_of(table: type[BaseModel]) -> list[str]:
    """The values of a table's `kind`, where that tells it from others."""
    field = table.model_fields.get("kind")
    literal = field.annotation if field is not None else None
    return [str(tag) for tag in get_args(literal)] if get_origin(literal) is Literal else []
