"""Rewards that run an answer's code: unit tests, programs, SQL queries. See `docs/toolbox.md`."""

from ludus.rewards.code_tests.programs import Programs
from ludus.rewards.code_tests.sql_match import SqlMatch
from ludus.rewards.code_tests.unit_tests import UnitTests

__all__ = ["Programs", "SqlMatch", "UnitTests"]
