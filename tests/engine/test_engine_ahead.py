"""What holds for the engine on a CPU holds with static steps and one of them under way, as on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
from test_engine_life import (
    test_a_cancelled_caller_takes_its_request_back,
    test_a_model_that_raises_fails_the_step_and_not_the_engine,
    test_abort_gives_what_there_is,
    test_closing_answers_everybody,
    test_diverged_weights_are_an_error_and_spoil_nothing_that_follows,
    test_dropout_is_off_while_sampling_and_back_on_afterwards,
    test_new_weights_drop_what_was_cached,
    test_new_weights_in_the_middle_of_a_score,
    test_new_weights_in_the_middle_of_an_action,
    test_several_event_loops_one_after_the_other,
)
from test_engine_sessions import (
    test_a_group_computes_its_prompt_once_even_when_it_arrives_together,
    test_a_running_session_can_be_forked,
    test_a_turn_computes_only_what_is_new,
    test_another_context_keeps_the_longest_common_prefix,
    test_fork_shares_the_past_and_parts_ways,
    test_the_same_request_alone_and_in_company,
)
from test_engine_stops import (
    test_a_decoder_that_raises_fails_its_request_alone,
    test_stop_token_is_included_and_stop_string_keeps_its_tokens,
    test_the_models_context_ends_a_generation,
)

from ludus.engine import EngineCore
from ludus.engine.embedded import engine as engine_module

__all__ = [
    "test_a_cancelled_caller_takes_its_request_back",
    "test_a_decoder_that_raises_fails_its_request_alone",
    "test_a_group_computes_its_prompt_once_even_when_it_arrives_together",
    "test_a_model_that_raises_fails_the_step_and_not_the_engine",
    "test_a_running_session_can_be_forked",
    "test_a_turn_computes_only_what_is_new",
    "test_abort_gives_what_there_is",
    "test_another_context_keeps_the_longest_common_prefix",
    "test_closing_answers_everybody",
    "test_diverged_weights_are_an_error_and_spoil_nothing_that_follows",
    "test_dropout_is_off_while_sampling_and_back_on_afterwards",
    "test_fork_shares_the_past_and_parts_ways",
    "test_new_weights_drop_what_was_cached",
    "test_new_weights_in_the_middle_of_a_score",
    "test_new_weights_in_the_middle_of_an_action",
    "test_several_event_loops_one_after_the_other",
    "test_stop_token_is_included_and_stop_string_keeps_its_tokens",
    "test_the_models_context_ends_a_generation",
    "test_the_same_request_alone_and_in_company",
]


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "EngineCore", partial(EngineCore, is_static=True, lookahead=1))
