from __future__ import annotations

import asyncio
import math

import pytest
import torch
from env_cases import completion, sampled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrl.envs.utils import check_env_specs

from torchrl_copc.envs import Final, Observation, PrefixError, TokenEnv, TokenEpisode, TurnLimits
from torchrl_copc.trajectory import (
    DONE,
    LOG_PROBS,
    POLICY_MASK,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TOKENS,
    TRUNCATED,
    Completion,
    Prompt,
    RowError,
    check_row,
)


class Parrot(TokenEnv):
    """Repeats what was said until it hears an answer."""

    def render_prompt(self, prompt: Prompt) -> list[int]:
        return self.codec.control("<user>" if self.codec.single_id("<user>") else "Q:")

    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        self.heard = text
        await asyncio.sleep(0)
        if "</answer>" in text:
            return Final(1.0)
        return Observation((f"{text} ",) * 3, "<information>", "</information>")

    def earned(self, episode: TokenEpisode, text: str) -> float:
        return 0.25


STOPS = ("</search>", "</answer>")
PROMPT = Prompt("p", "q", ("a",))


def make(tokenizer, **limits) -> Parrot:
    return Parrot(tokenizer, TurnLimits(**limits), stop_tags=STOPS, prompts=[PROMPT])


def begin(env: TokenEnv) -> TokenEpisode:
    return env.begin(PROMPT, "row", "group")


def advance(env: TokenEnv, episode: TokenEpisode, turn: Completion) -> None:
    asyncio.run(env.advance(episode, turn))


def policy_ids(episode: TokenEpisode) -> list[int]:
    return [i for i, is_policy in zip(episode.token_ids, episode.policy_mask, strict=True) if is_policy]


def test_request_names_single_token_tags_as_ids_and_others_as_strings(tag_tokenizer, chat_tokenizer):
    by_id = make(tag_tokenizer)
    request = by_id.next_turn(begin(by_id))
    assert request.stop_strings == ()
    tags = ["<eos>", *STOPS]
    assert request.stop_token_ids == tuple(sorted(tag_tokenizer.convert_tokens_to_ids(tags)))
    by_text = make(chat_tokenizer)
    request = by_text.next_turn(begin(by_text))
    assert request.stop_strings == STOPS
    assert request.stop_token_ids == (chat_tokenizer.eos_token_id,)


def test_ids_after_a_stop_token_go_with_their_log_probs(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    turn = completion(tag_tokenizer, "so <search> Mali</search> and <answer> more</answer>")
    advance(env, episode, turn)
    kept = tag_tokenizer.encode("so <search> Mali</search>")
    assert policy_ids(episode) == kept
    mask = torch.tensor(episode.policy_mask)
    assert torch.tensor(episode.log_probs)[mask].tolist() == pytest.approx(turn.log_probs[: len(kept)])
    assert env.heard == "so <search> Mali</search>"
    assert set(torch.tensor(episode.versions)[mask].tolist()) == {3}


@pytest.mark.parametrize("tail", ["", " and more", "</answer>", ">>", "\n\n"])
def test_a_stop_tag_of_several_tokens_is_found_in_the_text(chat_tokenizer, tail):
    env = make(chat_tokenizer)
    episode = begin(env)
    assert len(chat_tokenizer.encode("</search>")) > 1
    turn = completion(chat_tokenizer, f"é–<search> Mali</search>{tail}")
    advance(env, episode, turn)
    kept = len(policy_ids(episode))
    assert tuple(policy_ids(episode)) == turn.token_ids[:kept]
    assert "</search>" in chat_tokenizer.decode(turn.token_ids[:kept])
    assert "</search>" not in chat_tokenizer.decode(turn.token_ids[: kept - 1])
    assert env.heard.endswith("</search>>>" if tail == ">>" else "</search>")  # ">>>" is one token


def test_a_stop_tag_in_the_observation_or_prompt_stops_nothing(chat_tokenizer):
    env = make(chat_tokenizer)
    episode = begin(env)
    advance(env, episode, completion(chat_tokenizer, "<search> Mali</search>"))
    turn = completion(chat_tokenizer, "I read it.")
    advance(env, episode, turn)
    assert policy_ids(episode)[-len(turn.token_ids) :] == list(turn.token_ids)


def test_end_of_sequence_is_kept_as_a_policy_token_but_not_shown(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    advance(env, episode, completion(tag_tokenizer, "no idea<eos> junk"))
    assert env.heard == "no idea"
    assert policy_ids(episode)[-1] == tag_tokenizer.eos_token_id


def test_engine_stopping_early_for_length_is_a_terminated_row_with_what_was_earned(tag_tokenizer):
    env = make(tag_tokenizer, max_turn_tokens=5)
    episode = begin(env)
    advance(env, episode, sampled(tag_tokenizer.encode("and so on and on")[:5], "length"))
    assert (episode.terminated, episode.truncated, episode.finish_reason, episode.reward) == (
        True,
        False,
        "length",
        0.25,
    )


def test_a_stop_on_the_last_allowed_token_is_a_stop(tag_tokenizer):
    ids = tag_tokenizer.encode("<answer> a</answer>")
    env = make(tag_tokenizer, max_turn_tokens=len(ids))
    episode = begin(env)
    advance(env, episode, sampled(ids, "length"))
    assert (episode.finish_reason, episode.reward) == ("stop", 1.0)


def test_the_turn_limit_ends_the_episode_without_a_trailing_observation(tag_tokenizer):
    env = make(tag_tokenizer, max_turns=2)
    episode = begin(env)
    for _ in range(2):
        advance(env, episode, completion(tag_tokenizer, "<search> x</search>"))
    assert (episode.terminated, episode.finish_reason, episode.num_turns) == (True, "length", 2)
    assert episode.policy_mask[-1]


def test_observations_count_against_the_response_budget(tag_tokenizer):
    turn = completion(tag_tokenizer, "<search> x</search>")
    env = make(tag_tokenizer)
    episode = begin(env)
    advance(env, episode, turn)
    used = len(episode.token_ids) - episode.prompt_length
    assert used > len(turn.token_ids)
    exact = make(tag_tokenizer, max_response_tokens=used + 1)
    episode = begin(exact)
    advance(exact, episode, turn)
    assert exact.next_turn(episode).max_tokens == 1
    short = make(tag_tokenizer, max_response_tokens=used)
    episode = begin(short)
    advance(short, episode, turn)
    assert (episode.terminated, episode.finish_reason) == (True, "length")


def test_a_completion_longer_than_asked_is_an_error(tag_tokenizer):
    env = make(tag_tokenizer, max_turn_tokens=3)
    with pytest.raises(ValueError, match="5 tokens sampled, 3 were allowed"):
        advance(env, begin(env), sampled([20, 21, 22, 23, 24]))


def test_an_aborted_completion_truncates_and_earns_nothing(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    advance(env, episode, completion(tag_tokenizer, "and so", "abort"))
    assert (episode.terminated, episode.truncated, episode.finish_reason, episode.reward) == (
        False,
        True,
        "abort",
        0.0,
    )
    check_row(episode.to_row())


def test_no_tool_runs_for_an_aborted_completion_and_its_ids_end_at_the_tag(tag_tokenizer):
    env = make(tag_tokenizer)
    env.respond = None  # any call would fail
    episode = begin(env)
    before = len(episode.token_ids)
    advance(env, episode, completion(tag_tokenizer, "<search> x</search> and so", "abort"))
    assert env.codec.decode(episode.token_ids[before:]) == "<search> x</search>"
    assert (episode.truncated, episode.finish_reason) == (True, "abort")


def test_a_cut_row_keeps_its_trailing_observation_and_marks_the_last_policy_token(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    advance(env, episode, completion(tag_tokenizer, "<search> x</search>"))
    env.cut(episode, "deadline")
    row = episode.to_row()
    last = int(row[POLICY_MASK].nonzero()[-1])
    assert last < len(row) - 1
    assert bool(row[TRUNCATED][last]) and bool(row[DONE][last]) and not row[TERMINATED].any()
    assert int(row[DONE].sum()) == 1
    with pytest.raises(RuntimeError, match="finished"):
        env.next_turn(episode)


def test_a_tool_that_answers_after_the_cut_changes_nothing(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)

    async def cut_while_the_tool_runs() -> None:
        running = asyncio.ensure_future(
            env.advance(episode, completion(tag_tokenizer, "<search> x</search>"))
        )
        await asyncio.sleep(0)
        env.cut(episode, "deadline")
        length = len(episode.token_ids)
        await running
        assert len(episode.token_ids) == length

    asyncio.run(cut_while_the_tool_runs())
    assert (episode.finish_reason, episode.truncated) == ("deadline", True)


def test_an_episode_cut_before_its_first_token_makes_no_row(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    env.cut(episode, "deadline")
    with pytest.raises(RowError, match="no policy token"):
        episode.to_row()


@pytest.mark.parametrize(
    "tamper", [lambda ids: ids.pop(), lambda ids: ids.append(7), lambda ids: ids.__setitem__(0, 9)]
)
@pytest.mark.parametrize("call", ["next_turn", "advance"])
def test_rewritten_ids_are_noticed(tag_tokenizer, tamper, call):
    env = make(tag_tokenizer)
    episode = begin(env)
    turn = completion(tag_tokenizer, "<search> x</search>")
    advance(env, episode, turn)
    tamper(episode.token_ids)
    with pytest.raises(PrefixError, match="row row: the ids from position"):
        env.next_turn(episode) if call == "next_turn" else advance(env, episode, turn)


def test_ids_rewritten_by_the_environment_itself_are_noticed(tag_tokenizer):
    class Meddler(Parrot):
        async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
            episode.token_ids[0] += 1
            return await super().respond(episode, text)

    env = Meddler(tag_tokenizer, TurnLimits(), stop_tags=STOPS)
    with pytest.raises(PrefixError):
        advance(env, begin(env), completion(tag_tokenizer, "<search> x</search>"))


def test_the_engine_gets_its_own_copy_of_the_ids(tag_tokenizer):
    env = make(tag_tokenizer)
    episode = begin(env)
    env.next_turn(episode).token_ids.append(99)
    assert 99 not in env.next_turn(episode).token_ids


def test_an_observation_is_cut_between_chunks_and_always_closed(tag_tokenizer):
    chunk = " one two three"
    size = len(tag_tokenizer.encode(chunk))
    closing = tag_tokenizer.convert_tokens_to_ids("</information>")
    observation = Observation((chunk,) * 4, "<information>", "</information>")
    for limit in range(3, 4 * size + 4):
        ids = make(tag_tokenizer, max_observation_tokens=limit).encode_observation(observation)
        assert len(ids) <= limit
        assert ids[-1] == closing
        body = len(ids) - 2
        assert body == (limit - 2 if limit - 2 < size else min(4, (limit - 2) // size) * size)


def test_an_observation_limit_without_room_for_text_is_an_error(tag_tokenizer):
    env = make(tag_tokenizer, max_observation_tokens=2)
    with pytest.raises(ValueError, match="max_observation_tokens=2"):
        env.encode_observation(Observation(("text",), "<information>", "</information>"))


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match=r"limits\.max_turns is 0"):
        TurnLimits(max_turns=0)


turns = st.lists(st.tuples(st.lists(st.integers(0, 379), min_size=0, max_size=30), st.booleans()), max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=turns, budget=st.integers(1, 120), by_text=st.booleans())
def test_any_completions_give_an_append_only_row_that_holds_what_was_sampled(
    tag_tokenizer, chat_tokenizer, turns, budget, by_text
):
    tokenizer = chat_tokenizer if by_text else tag_tokenizer
    env = make(
        tokenizer, max_turns=4, max_turn_tokens=20, max_observation_tokens=40, max_response_tokens=budget
    )
    episode = begin(env)
    seen: list[int] = []
    kept: list[int] = []
    for ids, full in turns:
        if episode.done:
            break
        request = env.next_turn(episode)
        assert request.token_ids[: len(seen)] == seen
        assert 1 <= request.max_tokens <= 20
        turn = sampled(ids[: request.max_tokens], "length" if full else "stop")
        advance(env, episode, turn)
        new = episode.token_ids[len(request.token_ids) :]
        count = sum(episode.policy_mask[len(request.token_ids) :])
        assert new[:count] == list(turn.token_ids[:count])
        assert episode.token_ids[: len(request.token_ids)] == request.token_ids
        assert len(episode.token_ids) - episode.prompt_length <= budget
        kept += turn.token_ids[:count]
        seen = list(episode.token_ids)
    assert policy_ids(episode) == kept
    if not episode.done:
        env.cut(episode, "end of the script")
    if kept:
        row = episode.to_row()
        check_row(row)
        assert row[TOKENS][row[POLICY_MASK]].tolist() == kept
        assert row[REWARD].sum() == episode.reward


# As a TorchRL environment.


@pytest.mark.parametrize("by_text", [False, True])
def test_check_env_specs(tag_tokenizer, chat_tokenizer, by_text):
    env = make(chat_tokenizer if by_text else tag_tokenizer, max_turns=2)
    check_env_specs(env, break_when_any_done="both")
    env.close()


def scripted_policy(tokenizer, texts):
    remaining = iter(texts)

    def policy(td):
        ids = tokenizer.encode(next(remaining), add_special_tokens=False)
        td["action"] = torch.tensor(ids)
        td["action_log_prob"] = torch.full((len(ids),), -0.5)
        return td

    return policy


def test_a_scripted_policy_rolls_out_and_the_last_observation_is_the_row(tag_tokenizer):
    env = make(tag_tokenizer)
    rollout = env.rollout(10, scripted_policy(tag_tokenizer, ["<search> x</search>", "<answer> y</answer>"]))
    assert len(rollout) == 2
    last = rollout[-1]["next"]
    assert last[REWARD[-1]].item() == 1.0 and last[TERMINATED[-1]].item() and last[DONE[-1]].item()
    row = env.episode.to_row()
    check_row(row)
    for key in (TOKENS, POLICY_MASK, LOG_PROBS, POLICY_VERSION):
        assert torch.equal(last[key], row[key])


def test_rows_sampled_without_log_probs_are_refused_at_admission(tag_tokenizer):
    env = make(tag_tokenizer)
    td = env.reset()
    td["action"] = torch.tensor(tag_tokenizer.encode("<answer> y</answer>"))
    env.step(td)
    assert math.isnan(env.episode.log_probs[-1])
    with pytest.raises(RowError, match="nan"):
        check_row(env.episode.to_row())


def test_reset_takes_the_prompts_in_turn_and_the_seed_sets_where_it_starts(tag_tokenizer):
    prompts = [Prompt(str(i), "q", ("a",)) for i in range(3)]
    env = Parrot(tag_tokenizer, TurnLimits(), stop_tags=STOPS, prompts=prompts)

    def ids(count):
        return [(env.reset(), env.episode.prompt.id)[1] for _ in range(count)]

    assert ids(4) == ["0", "1", "2", "0"]
    env.set_seed(1)
    assert ids(2) == ["1", "2"]


def test_reset_without_prompts_says_what_to_pass(tag_tokenizer):
    env = Parrot(tag_tokenizer, TurnLimits(), stop_tags=STOPS)
    with pytest.raises(RuntimeError, match=r"pass prompts=\[Prompt"):
        env.reset()
