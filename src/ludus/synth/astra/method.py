"""`ludus synth astra`: an environment, tasks and trajectories from a page of text.

A language model designs the tools and writes the rules. What it wrote is hostile until shown otherwise: it is
tried in the sandbox (`examination`), and the model reads what is wrong and writes it again. Only an
environment without findings is packaged.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import Field

from ludus.core.chat import ChatOptions
from ludus.core.config import Place
from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import is_success
from ludus.core.user_files import read_user_text
from ludus.envs.sandboxed import WorldSpec
from ludus.observe import ReportTable
from ludus.synth.asking import ModelSpec
from ludus.synth.astra.design import design_spec, write_rules
from ludus.synth.astra.examination import Examination, examine, make_tasks, play_solutions
from ludus.synth.astra.package import write_package, write_world
from ludus.synth.method import SynthConfig, SynthContext, SynthMethod
from ludus.synth.result import ItemResult, Rejected, SynthResult, with_provenance

_BATCH = 32
"""Tasks that are made and played together."""


class AstraConfig(SynthConfig):
    """ASTRA: an environment from a page of text."""

    page: Place
    """The text file that describes the job."""
    designer: ModelSpec
    """The language model that designs the environment and writes its rules."""
    attempts: int = Field(default=4, ge=1)
    """How often the rules may be written until nothing is found wrong with them."""
    train: int = Field(default=64, ge=4)
    """Training tasks."""
    held_out: int = Field(default=16, ge=1)
    """Held-out tasks."""
    sample: int = Field(default=8, ge=2)
    """Tasks on which rules are tried."""
    max_tokens: int = Field(default=6000, ge=256)
    """Of an answer of the language model."""
    temperature: float = Field(default=0.3, ge=0)
    """Of the language model."""


class Astra(SynthMethod[AstraConfig]):
    """An environment from a page of text."""

    title = "ASTRA"
    settings_type = AstraConfig
    needs_policy = False

    async def run(self, context: SynthContext) -> SynthResult:
        page = _read(self.settings.page)
        spec = await self._designed(context, page)
        drafts: list[Json] = []
        folder = Path(context.folder.path) / "environment"
        rules, findings = "", [""]
        while findings:
            if len(drafts) >= self.settings.attempts:
                raise LudusError(_rejection(self.settings.page, drafts))
            previous, problems = rules, [one for one in findings if one]
            draft = await self._draft(context, len(drafts), folder, page, spec, previous, problems)
            drafts.append(draft)
            rules, findings = str(draft["rules"]), list(draft["findings"])
        write_world(folder, page, spec, rules)
        result = await self._played(context, folder, spec, rules)
        rows: list[list[Any]] = [
            [number, "; ".join(one["findings"]) or "good"] for number, one in enumerate(drafts, start=1)
        ]
        result.tables.append(ReportTable(("draft", "found"), rows, "Drafts of the rules"))
        for way, share in drafts[-1]["refused"].items():
            result.numbers[f"{way}_solutions_refused"] = share
        return result

    @property
    def _options(self) -> ChatOptions:
        return ChatOptions(self.settings.max_tokens, self.settings.temperature)

    async def _designed(self, context: SynthContext, page: str) -> WorldSpec:
        model = await context.model(self.settings.designer)

        async def design() -> ItemResult:
            spec = await design_spec(page, model, self._options)
            return ItemResult(notes={"spec": spec.model_dump(mode="json")})

        return WorldSpec.model_validate((await context.once("design", design)).notes["spec"])

    async def _draft(
        self,
        context: SynthContext,
        number: int,
        folder: Path,
        page: str,
        spec: WorldSpec,
        previous: str,
        problems: list[str],
    ) -> Json:
        """Rules, and what is wrong with them."""
        model = await context.model(self.settings.designer)

        async def write() -> ItemResult:
            rules = await write_rules(page, spec, model, self._options, previous, problems)
            write_world(folder, page, spec, rules)
            found: Examination = await examine(folder, spec, rules, self.settings.sample)
            findings = [str(one) for one in found.findings]
            return ItemResult(notes={"rules": rules, "findings": findings, "refused": found.refused})

        return (await context.once(f"draft-{number + 1}", write)).notes

    async def _played(
        self, context: SynthContext, folder: Path, spec: WorldSpec, rules: str
    ) -> SynthResult:
        """The tasks and their solutions, played; and the folder."""
        wanted = self.settings.train + self.settings.held_out
        batches = [range(start, min(start + _BATCH, wanted)) for start in range(0, wanted, _BATCH)]

        async def play(seeds: range) -> ItemResult:
            tasks = await make_tasks(spec, rules, seeds)
            return ItemResult(await play_solutions(folder, spec, tasks))

        pieces = await context.each("tasks", batches, play, name=str)
        result = SynthResult()
        seen: set[str] = set()
        kept = []
        for one in [trajectory for piece in pieces for trajectory in piece.trajectories]:
            alike = json.dumps([one.task.messages[-1].content, one.task.metadata["state"]])
            if not is_success(one):
                result.rejected.append(Rejected(one, "unsolved", f"reward {one.reward}"))
            elif alike in seen:
                result.rejected.append(Rejected(one, "duplicate", one.task.messages[-1].content))
            else:
                seen.add(alike)
                kept.append(with_provenance(one, method="astra", environment=spec.name))
        # an even share of what there is, where the rules give fewer different tasks than were asked for
        share = self.settings.held_out / wanted
        apart = min(self.settings.held_out, max(1, round(share * len(kept))))
        if len(kept) < 4:
            raise LudusError(f"only {len(kept)} different tasks could be made: {dict(result.reasons)}")
        if len(kept) < wanted:
            result.warnings.append(
                f"{len(kept)} of {wanted} tasks could be made: {dict(result.reasons)}"
            )
        result.kept = kept[apart:]
        training: list[Task] = [one.task for one in result.kept]
        write_package(folder, spec, training, [one.task for one in kept[:apart]], result.kept)
        result.numbers |= {"training_tasks": len(training), "held_out_tasks": apart}
        result.numbers["tools"] = len(spec.tools)
        result.warnings.append(_next(folder))
        return result


def _next(folder: Path) -> str:
    file, recipe = folder / "environment.py", shlex.quote(str(folder / "recipe.toml"))
    check = ["ludus", "check", "env", f"{file}:World", "--tasks", str(folder / "tasks.jsonl")]
    check += ["--expert", f"{file}:expert", "--reward", f"{file}:success"]
    return f"the environment is in {folder}: {shlex.join(check)}; ludus train {recipe}"


def _rejection(page: str, drafts: list[Json]) -> str:
    lines = [
        f"draft {number}: {'; '.join(one['findings'])}" for number, one in enumerate(drafts, start=1)
    ]
    return f"no environment could be made of {page} in {len(drafts)} attempts\n" + "\n".join(lines)


def _read(place: str) -> str:
    text = read_user_text(place)
    if not text.strip():
        raise ConfigError(f"{place} is empty: it should describe a job")
    return text
