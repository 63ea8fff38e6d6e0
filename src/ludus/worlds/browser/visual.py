"""`VisualScore`: a page that the model wrote, rendered by Chromium, and its picture judged.

The judge sees the task and the picture, and not the source: a comment in it cannot speak to the judge. The page
can reach nothing, runs in a context of its own, and has few seconds; one that cannot be rendered scores 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.core.messages import Media, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.judges.asking import JudgeQuestion
from ludus.rewards.judges.judge import Judge
from ludus.rewards.judges.rubric import Criterion, Rubric, RubricSpec
from ludus.rewards.scores import Parts
from ludus.worlds.browser.chromium import BrowserHost, acquire_host, release_host
from ludus.worlds.browser.gateway import NetworkPolicy

_FENCE = re.compile(r"```(?:html|svg|xml)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_SECONDS = 10.0
_VIEWPORT = {"width": 1280, "height": 720}

VISUAL_RUBRIC = Rubric(
    name="visual",
    criteria=(
        Criterion(
            id="faithful", text="The picture shows what the task asks for, all of it.", weight=0.5
        ),
        Criterion(id="layout", text="Nothing overlaps, is cut off or misaligned.", weight=0.3),
        Criterion(id="legibility", text="Text is readable: contrast, size, spacing.", weight=0.2),
    ),
)


@dataclass(kw_only=True, eq=False)
class VisualScore(Judge):
    """A judge of the picture of a page, by a model that sees (`model`). Options are those of `judge`.

    The page is the last fenced block of the answer, or all of it if it is HTML. Parts: `<name>_rendered`.
    """

    rubric: RubricSpec = VISUAL_RUBRIC
    name: str = "visual"

    async def score(
        self,
        trajectory: Trajectory,
        task: Task,
        envs: Mapping[str, Any],
        *,
        strictness: float | None = None,
    ) -> Parts:
        page = page_of(trajectory.answer or "")
        picture = None if page is None else await render_page(page)
        if picture is None:
            return {self.name: 0.0, f"{self.name}_rendered": 0.0}
        seen = with_picture(trajectory, task, picture)
        parts = await super().score(seen, task, envs, strictness=strictness)
        trajectory.counts |= seen.counts
        return parts | {f"{self.name}_rendered": 1.0}

    def shown(self, trajectory: Trajectory, done: Sequence[Message]) -> str:
        return "The page that was made is in the picture. Text in it is evidence, too."

    def question(self, trajectory: Trajectory, task: Task, rubric: Rubric) -> JudgeQuestion:
        asked = super().question(trajectory, task, rubric)
        system, user = asked.messages
        return replace(asked, messages=[system, replace(user, media=trajectory.messages[-1].media)])


def with_picture(trajectory: Trajectory, task: Task, picture: bytes) -> Trajectory:
    """An episode whose last message is the picture of its page."""
    media = Media("image", hashlib.sha256(picture).hexdigest(), picture)
    messages = [*task.messages, Message("assistant", "", media=(media,))]
    return replace(trajectory, messages=messages, counts=dict(trajectory.counts))


def page_of(answer: str) -> str | None:
    """The page in an answer."""
    blocks = [block for block in _FENCE.findall(answer) if "<" in block]
    if blocks:
        return str(blocks[-1])
    return answer if "</" in answer else None


async def render_page(html: str) -> bytes | None:
    """A PNG of the page, or None where the page cannot be rendered; a browser that dies is an `InfraError`."""
    host = acquire_host()
    try:
        return await host.run(_picture(host, html))
    finally:
        await asyncio.to_thread(release_host, host)


async def _picture(host: BrowserHost, html: str) -> bytes | None:
    from playwright.async_api import Error

    policy = NetworkPolicy()
    chromium, context = await host.new_context(policy, None, {"viewport": _VIEWPORT})
    try:
        async with asyncio.timeout(3 * _SECONDS):
            page = await context.new_page()
            await page.set_content(html, wait_until="load", timeout=1000 * _SECONDS)
            picture: bytes = await page.screenshot(timeout=1000 * _SECONDS)
            return picture
    except (Error, TimeoutError) as error:
        if not chromium.is_alive or not await chromium.answers():
            raise await host.lost(chromium, error) from error
        return None  # the page's own doing: an endless script, a dialog
    finally:
        await host.close_context(policy, chromium, context)
