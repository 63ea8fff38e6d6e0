"""Error messages for a table of settings: the key as the user writes it, the problem, and the fix.

Pydantic's locations hold more than keys: the branch of a union that was tried, and the tag of a table.
`_follow` walks the models along such a location and keeps the keys only.
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
"""Expected kind of value, by the first word of pydantic's name for the problem."""
_WRONG_KIND = ("type", "parsing", "number", "size", "float", "attributes_type")


_KEYS_ELSEWHERE = {
    "rl.attempts": "num_generations group_size n rollout_n num_samples n_samples_per_prompt "
    "rollouts_per_example",
    "rl.tasks": "batch_size train_batch_size rollout_batch_size generation_batch_size "
    "per_device_train_batch_size",
    "rl.optimizer.micro_batch_tokens": "gradient_accumulation_steps ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu",
    "rl.updates": "ppo_mini_batch_size steps_per_generation",
    "rl.epochs": "num_iterations ppo_epochs",
    "warm_start.epochs": "num_train_epochs",
    "rl.steps": "total_epochs max_steps total_training_steps",
    "rl.optimizer.learning_rate": "lr learning_rate",
    "rl.optimizer.name": "optim",
    "rl.optimizer.betas": "adam_beta1 adam_beta2",
    "rl.optimizer.schedule": "lr_scheduler_type",
    "rl.optimizer.warmup_steps": "warmup_steps",
    "rl.optimizer.weight_decay": "weight_decay",
    "rl.optimizer.max_gradient_norm": "max_grad_norm grad_clip",
    "rl.optimizer.activation_memory": "gradient_checkpointing enable_gradient_checkpointing "
    "activation_checkpointing",
    "rl.kl": "beta kl_coef kl_loss_coef",
    "rl.kl.place": "use_kl_in_reward use_kl_loss",
    "rl.kl.estimator": "kl_loss_type kl_penalty",
    "rl.entropy": "entropy_coeff entropy_coef",
    "rl.algorithm": "adv_estimator advantage_estimator loss_type",
    "rl.aggregation": "loss_agg_mode",
    "rl.algorithm = dr_grpo": "scale_rewards norm_adv_by_std_in_grpo",
    "rl.refill": "filter_groups",
    "rl.loss = { clip_low = 0.2 }": "epsilon clip_ratio_low",
    "rl.loss = { clip_low = 0.2, clip_high = 0.2 }": "clip_ratio",
    "rl.loss = { clip_high = 0.28 }": "epsilon_high clip_ratio_high",
    "rl.loss = gspo": "importance_sampling_level",
    "rl.correction = { name = truncated, high = 2.0 }": "vllm_importance_sampling_cap tis_imp_ratio_cap",
    "rl.algorithm = { name = ppo, discount = 1.0 }": "gamma",
    "rl.algorithm = { name = ppo, lam = 0.95 }": "lam",
    "rl.staleness": "max_async_level async_level max_off_policy_steps",
    "rl.reference_sync": "sync_ref_model",
    "rl.reference_sync.every": "ref_model_sync_steps",
    "rl.reference_sync.mixup_alpha": "ref_model_mixup_alpha",
    "rl.broken.over_length = mask": "mask_truncated_completions",
    "rl.loss_mask": "mask_env_responses mask_env_response",
    "budgets.max_turn_tokens": "max_completion_length max_response_length max_new_tokens max_completion_tokens",
    "budgets.max_tokens": "max_seq_length max_length max_model_len seq_len max_seq_len",
    "budgets.max_turns": "max_assistant_turns max_tool_calling_iterations",
    "sampling.temperature": "temperature",
    "model.lora": "peft_config use_peft",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.name": "model_name_or_path model_path base_model",
    "model.dtype": "torch_dtype",
    "model.dtype = bfloat16": "bf16",
    "model.chat_template_kwargs = { enable_thinking = false }": "enable_thinking",
    "max_in_flight": "max_concurrent max_concurrent_rollouts",
    "agent.envs": "env_id env_args environment_factory",
    "agent.tools": "tool_config_path",
    "agent.format": "tool_call_parser",
    "agent.system": "system_prompt",
    "cluster.trainer_ranks": "n_gpus_per_node num_train_gpus num_processes",
    "cluster.engines": "num_infer_gpus",
    "cluster.servers": "use_vllm vllm_mode vllm_server_base_url",
    "engine.memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.max_running": "max_num_seqs",
    "engine.tokens_per_step": "max_num_batched_tokens",
    "engine.block_size": "page_size",
    "tasks.train": "dataset dataset_name train_dataset train_files",
    "tasks.train = dataset:NAME:CONFIG@SPLIT": "dataset_config",
    "tasks.evaluation": "eval_dataset val_files",
    "tasks.columns = { prompt = question }": "prompt_key",
    "rewards": "reward_funcs reward_functions reward_fn rubric reward_weights",
    "run.folder": "output_dir",
    "run.checkpoint_every": "save_steps save_freq",
    "run.keep_checkpoints": "save_total_limit keep_last",
    "evaluation.every": "eval_steps test_freq",
    "evaluation.tasks": "num_examples",
    "evaluation.attempts": "num_generations_eval",
    "run.wandb.project": "report_to wandb_project project_name",
    "run.wandb.name": "run_name experiment_name",
}
"""A key of a recipe, and the words that TRL, verl and others have for it."""
OTHER_FRAMEWORKS_KEYS = {word: key for key, words in _KEYS_ELSEWHERE.items() for word in words.split()}


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


def takes_none(annotation: Any, *, is_bare: bool) -> bool:
    """Whether a setting is optional, and the text "none" (`is_bare`: unquoted) can mean nothing else."""
    kinds = set(_kinds(annotation))
    named = {one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)}
    return type(None) in kinds and (is_bare or str not in kinds) and "none" not in named


def refuse_coercion(model: type[BaseModel], raw: Mapping[str, Any]) -> None:
    """Raise where pydantic would convert text or a bool to a number, or text or a number to a bool.

    TOML has a type of its own for each of them, so this is a mistake in the recipe.
    """
    found: list[Any] = [
        {"type": kind, "loc": (name,), "input": raw[name]}
        for name, field in model.model_fields.items()
        if name in raw and (kind := _coercion(field.annotation, raw[name]))
    ]
    if found:
        raise ValidationError.from_exception_data(model.__name__, found)


def _coercion(annotation: Any, value: Any) -> str | None:
    """Pydantic's name for the problem with a value that it would convert; None when there is none."""
    kinds = set(_kinds(annotation))
    is_plain = kinds <= {int, float, bool, type(None)}  # other unions decide for themselves
    if not is_plain or type(value) in kinds or not isinstance(value, str | bool | int | float):
        return None
    if bool in kinds and not isinstance(value, bool):
        return "bool_type"
    if isinstance(value, str | bool) and kinds & {int, float}:
        return "int_type" if int in kinds else "float_type"
    return None


_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def type_mismatch(annotation: Any, value: Any) -> str | None:
    """The expected type of a wrongly typed scalar ("must be a number"); None where its type fits.

    Python would take text as true and a bool as a number. Types that are no scalars of a recipe, such as
    numpy's numbers, are not judged.
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
    """Suggested replacement for an unknown key of the table at `place`; keys of other tables in full."""
    known = sorted({name for table in tables for name in table.model_fields})
    kinds = [kind for table in tables for kind in _tags_of(table)] or [_dotted(place)]
    renamed: Mapping[str, str] = getattr(whole, "renamed", {})
    for kind in kinds:
        if (new := renamed.get(f"{kind}.{key}")) is not None:
            return f"is called otherwise now: {new.format(table=_dotted(place))}"
    path, _, value = OTHER_FRAMEWORKS_KEYS.get(key.lower(), "").partition(" = ")
    parts = path.split(".")
    # in this table or in one inside it, where that has it; then this table's key of that beginning
    inner = [".".join(parts[i:]) for i in range(len(parts)) if has_key(tables, ".".join(parts[i:]))]
    if inner or has_key([whole], path):
        inner += [name for name in known if key.lower().startswith(f"{name}_")]
        path = _dotted([*place, inner[0]]) if inner else path
        return f"unknown key; did you mean {path + (f' = {value}' if value else '')!r}?"
    near = get_close_matches(key, known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    if not known:
        return "unknown key; there are none here"
    elsewhere = [f"; {told}" for table in tables if (told := getattr(table, "other_keys", ""))]
    return f"unknown key; known keys: {', '.join(known)}{''.join(elsewhere)}"


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
    """The members of a union type, without None and without annotations."""
    return [kind for kind in _kinds(hint) if kind is not type(None)]


def _inside(hint: Any) -> Any:
    """Element type of a list, or value type of a table with free keys."""
    arguments = [argument for argument in get_args(hint) if argument is not ...]
    return arguments[-1] if arguments else Any


def _tags_of(table: type[BaseModel]) -> list[str]:
    """The values of a table's `kind`, where that tells it from others."""
    field = table.model_fields.get("kind")
    literal = field.annotation if field is not None else None
    return [str(tag) for tag in get_args(literal)] if get_origin(literal) is Literal else []
