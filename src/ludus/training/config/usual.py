"""Defaults that depend on the model: decided and printed when a run begins.

A learning rate that suits a model made from scratch ruins a pretrained one. A written value always wins. What
was decided is in the run's recipe.json, so that a resumed run goes on by it.
"""

from __future__ import annotations

from ludus.algos.specs import ALGORITHMS
from ludus.training.config.recipe import Recipe, StageConfig
from ludus.training.config.rl import CriticConfig, RLConfig
from ludus.training.config.stages import CRITIC_RATES, EvaluationStageConfig, UsualRates


def with_usual_settings(recipe: Recipe) -> Recipe:
    """The recipe with a learning rate for all that learns, and a critic where an algorithm needs one."""
    return recipe.with_stages(_with_usual(one, recipe) for one in recipe.stages)


def _with_usual(stage: StageConfig, recipe: Recipe) -> StageConfig:
    if isinstance(stage, EvaluationStageConfig) or stage.usual_rates is None:
        return stage
    model = recipe.model
    update: dict[str, object] = {"optimizer": stage.optimizer.for_model(stage.usual_rates, model)}
    if isinstance(stage, RLConfig) and (stage.critic is not None or _needs_critic(stage)):
        update["critic"] = (stage.critic or CriticConfig()).for_model(model, stage.steps)
    return stage.model_copy(update=update)


def _needs_critic(stage: RLConfig) -> bool:
    if not stage.steps:
        return False
    if (spec := ALGORITHMS.get(stage.algorithm.name or "")) is not None:
        return spec.has_critic
    from ludus.algos import Need, load_algorithm  # torch comes with it

    return Need.CRITIC in load_algorithm(**stage.algorithm_settings).needs


def rate_notes(recipe: Recipe) -> list[str]:
    """The learning rates of a recipe in which they are decided, and whether they are usual, for what."""
    notes: list[str] = []
    for where, stage in recipe.named_stages:
        if (
            isinstance(stage, EvaluationStageConfig)
            or stage.usual_rates is None
            or not stage.total_steps
        ):
            continue
        notes.append(_note(where, stage.optimizer.peak_rate, stage.usual_rates, recipe))
        if isinstance(stage, RLConfig) and stage.critic is not None:
            rate = stage.critic.optimizer.peak_rate
            notes.append(_note(f"{where}.critic", rate, CRITIC_RATES, recipe))
    return notes


def _note(where: str, rate: float, usual: UsualRates, recipe: Recipe) -> str:
    model = recipe.model
    if model.lora is not None:
        what = "an adapter (LoRA)"
    else:
        what = (
            "a model made from scratch" if model.is_from_scratch else "all weights of a pretrained model"
        )
    expected = usual.of(model)
    than = f"usual for {what}" if rate == expected else f"as written; usual for {what}: {expected:g}"
    return f"learning rate of {where}: {rate:g} ({than})"
