"""Run the attacks by hand, with `tests/sandbox` on the path: `python -m attacks --rounds 3 --uid 65534`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys

from attacks.user import exec_as


def main() -> None:
    parser = argparse.ArgumentParser(description="attacks on the sandbox, with honest work between them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help="without namespaces")
    parser.add_argument("--uid", type=int, help="as this user; needs root")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--verbose", action="store_true", help="tell of each attack on standard error")
    given = parser.parse_args()
    if given.uid is not None and given.uid != os.getuid():
        exec_as(given.uid, [sys.executable, "-m", "attacks", *sys.argv[1:]], dict(os.environ))
    from attacks.campaign import CASES, Campaign
    from attacks.host import arrange

    arrange(bare=given.bare)
    cases = [case for case in CASES if given.only is None or given.only in case.name]

    async def run() -> None:
        told = (lambda text: print(text, file=sys.stderr)) if given.verbose else (lambda text: None)
        campaign = Campaign(bare=given.bare, seed=given.seed, at_once=given.at_once, told=told)
        report = await campaign.run(cases, given.rounds)
        sys.stdout.write(json.dumps(dataclasses.asdict(report), indent=1) + "\n")

    asyncio.run(run())


main()
