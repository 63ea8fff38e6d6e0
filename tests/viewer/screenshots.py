"""Make the pictures of docs/viewer.md: python tests/viewer/screenshots.py RUNS [PAGE ...].

RUNS holds helpdesk-001, tickets-001 to tickets-003 (seeds), and for the pages `replay` and `tokens` babyai-001
and safe-001. Needs Chromium, playwright and Pillow.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from test_viewer_browser import CHROMIUM, FLAGS
from viewer_runs import running_viewer

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}
TALL = {"width": 1280, "height": 1130}
STEP = "helpdesk-001/step-000016.parquet"
PAIRED = "a_run=tickets-001&a_split=eval&a_step=300&b_run=tickets-001&b_split=eval&b_step=320"
PAGES = {
    "runs": ("/", LAPTOP, "dark"),
    "run": ("/run/tickets-001?smooth=0.4&with=tickets-002&with=tickets-003", TALL, "light"),
    "episodes": ("/episodes?run=helpdesk-001&faulted=stock", LAPTOP, "light"),
    "replay": ("/episode/{babyai}", LAPTOP, "dark"),
    "tokens": ("/episode/{safe}?view=tokens&colour=entropy", LAPTOP, "dark"),
    "compare": (f"/compare?episode={STEP}/4&episode={STEP}/5", LAPTOP, "light"),
    "paired": (f"/compare?{PAIRED}", LAPTOP, "dark"),
    "phone": (f"/episode/{STEP}/32", PHONE, "dark"),
    "play": ("/play", LAPTOP, "light"),
    "labels": ("/labels", LAPTOP, "dark"),
}  # fmt: skip


def main(root: Path, *names: str) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from ludus.training import load_parts, load_recipe

    IMAGES.mkdir(exist_ok=True)
    recipe = load_recipe("safe", [])
    with running_viewer(root, play=(recipe, load_parts(recipe))) as viewer, sync_playwright() as driver:
        viewer.headers = {"Authorization": f"Bearer {viewer.token}"}
        viewer.settled()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, (path, size, scheme) in PAGES.items():
            if names and name not in names:
                continue
            for run in ("babyai", "safe"):
                if f"{{{run}}}" in path:
                    split = "train" if run == "safe" else "eval"
                    [row] = viewer.get("/api/episodes", run=f"{run}-001", split=split, limit=1).json[
                        "episodes"
                    ]
                    path = path.replace(f"{{{run}}}", f"{row['run']}/{row['file']}/{row['row']}")
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(f"{viewer.address}/?token={viewer.token}")
            page.goto(viewer.address + path)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(600)
            if name == "tokens":
                page.locator(".segment.action .tok").nth(1).hover()
            if name == "play":
                page.get_by_role("button", name="Start").click()
                form = page.locator("form[aria-label='call turn']")
                form.get_by_label("to", exact=True).fill("5")
                form.get_by_role("button").click()
                page.locator(".message.tool").wait_for()
            page.wait_for_timeout(300)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.save(IMAGES / f"viewer-{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
