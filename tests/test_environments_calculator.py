"""Task calculator: problems, splits, episodes, demonstrations, latency, control rewards."""

from __future__ import annotations

import itertools
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.environments import Environment, Problem, Reply, Task
from estr.environments.calculator import CalculatorTask
from estr.environments.episode import CalculatorEnvironment
from estr.environments.latency import Latency
from estr.environments.word_problems import (
    ITEMS,
    NAMES,
    TEMPLATES,
    WordProblem,
    draw,
    is_held_out,
    is_sound,
)
from estr.errors import UsageError


def play(environment, problem, turns, seed=1):
    """Hand ``turns`` to a fresh episode; the replies and the reward."""
    environment.reset(problem, seed)
    return [environment.step(turn) for turn in turns], environment.reward()


PROBLEM = Problem("p", "Ann fills 12 boxes with 5 pens each.", 60)


def test_fulfils_the_interfaces():
    task = CalculatorTask()
    assert isinstance(task, Task)
    assert isinstance(task.environment(), Environment)
    assert task.environment().blocking is False
    assert task.environment().stop == ("</calc>",)


@pytest.mark.parametrize(
    ("name", "numbers", "answer", "steps"),
    [
        ("boxes", (12, 5), 60, [("12*5", "60")]),
        ("trade", (50, 20, 7), 37, [("50-20", "30"), ("30+7", "37")]),
        ("shop", (3, 4, 50), 38, [("3*4", "12"), ("50-12", "38")]),
        ("wages", (10, 5, 20, 3), 10, [("10*5", "50"), ("50-20", "30"), ("30/3", "10")]),
        ("farm", (4, 5, 6, 7), 62, [("4*5", "20"), ("6*7", "42"), ("20+42", "62")]),
    ],
)
def test_solutions(name, numbers, answer, steps):
    template = next(template for template in TEMPLATES if template.name == name)
    problem = WordProblem(template, numbers, ("Ann", "Ben"), "pens")
    assert problem.answer == answer
    assert problem.solve() == steps
    assert all(str(number) in problem.prompt for number in numbers)


def test_unsound_numbers_are_refused():
    by_name = {template.name: template for template in TEMPLATES}
    assert not is_sound(by_name["share"], (7, 2))
    assert not is_sound(by_name["give"], (3, 5))
    assert not is_sound(by_name["give"], (5, 5))
    assert not is_sound(by_name["shop"], (12, 12, 99))
    assert is_sound(by_name["shop"], (2, 3, 6 + 1))


def test_templates_cover_the_levels_with_a_small_vocabulary():
    assert len(TEMPLATES) >= 12
    assert {template.level for template in TEMPLATES} == {1, 2, 3}
    words = set(NAMES) | set(ITEMS)
    for template in TEMPLATES:
        words |= set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", template.text)))
    assert len(words) <= 150


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sets(st.sampled_from([1, 2, 3]), min_size=1), st.booleans())
def test_every_problem_is_sound(key, levels, held_out):
    problem = draw(str(key), sorted(levels), held_out)
    assert problem.template.level in levels
    assert is_held_out(problem.template, problem.numbers) == held_out
    assert 12 <= len(problem.prompt.split()) <= 25
    assert all(2 <= number <= 99 for number in problem.numbers)
    results = [int(result) for _, result in problem.solve()]
    assert all(0 <= result <= 9999 for result in results)
    assert problem.answer == results[-1] > 0


def key_of(problem):
    return problem.info["template"], tuple(problem.info["numbers"])


def numbers_in(text):
    return tuple(map(int, re.findall(r"\d+", text)))


def test_no_training_problem_has_the_numbers_of_a_held_out_one():
    """Disjoint in (template, numbers), across task seeds, and in the demonstrations too."""
    held_out = {key_of(p) for seed in (0, 1) for p in CalculatorTask(seed=seed).eval_problems(400)}
    training = {key_of(CalculatorTask(seed=seed).train_problem(i)) for seed in (0, 1, 2) for i in range(1500)}
    assert not held_out & training
    assert len(held_out) > 700
    openings = {m[0]["content"] for m in itertools.islice(CalculatorTask().demonstrations(0), 1500)}
    shapes = {(re.sub(r"\d+", "#", text), numbers_in(text)) for text in openings}
    evaluated = {p.prompt for p in CalculatorTask().eval_problems(400)}
    assert not shapes & {(re.sub(r"\d+", "#", text), numbers_in(text)) for text in evaluated}


def test_training_problems_depend_on_seed_and_index_alone():
    one, two = CalculatorTask(seed=3), CalculatorTask(seed=3)
    two.train_problem(7)
    assert [one.train_problem(i) for i in range(50)] == [two.train_problem(i) for i in range(50)]
    assert one.train_problem(5) != CalculatorTask(seed=4).train_problem(5)
    assert one.train_problem(10**12).answer > 0


def test_training_never_repeats_an_order():
    prompts = [CalculatorTask().train_problem(i).prompt for i in range(2000)]
    assert len(set(prompts)) > 1900
    assert len({p.task_id for p in map(CalculatorTask().train_problem, range(200))}) == 200


def test_evaluation_is_the_same_at_every_call():
    task = CalculatorTask()
    assert task.eval_problems(30) == task.eval_problems(60)[:30]
    assert len({key_of(p) for p in task.eval_problems(300)}) == 300
    assert task.eval_problems(0) == []


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels(level):
    task = CalculatorTask(levels=[level])
    assert {task.train_problem(i).info["level"] for i in range(20)} == {level}


def test_an_episode():
    environment = CalculatorTask().environment()
    assert environment.reset(PROBLEM, 1) == [{"role": "user", "content": PROBLEM.prompt}]
    assert environment.step("<calc>12*5</calc>") == Reply(({"role": "tool", "content": "60"},))
    assert environment.reward() == 0.0
    assert environment.step("#### 60") == Reply(done=True)
    assert environment.reward() == 1.0


@pytest.mark.parametrize(
    ("turns", "done", "reward"),
    [
        (["#### 60"], True, 1.0),
        (["#### 60.0"], True, 1.0),
        (["#### 61"], True, 0.0),
        (["I do not know"], True, 0.0),
        ([""], True, 0.0),
        (["60"], True, 0.0),
        (["<calc>12*5</calc>"], False, 0.0),
        (["<calc>12*5"], False, 0.0),
        (["12*5</calc>", "#### 60"], True, 1.0),
        (["<calc>1/0</calc>", "<calc>12*5</calc>", "#### 60"], True, 1.0),
        (["#### 60 <calc>12*5</calc>"], True, 1.0),
        (["<calc>12*5</calc> #### 60"], False, 0.0),
    ],
)
def test_endings_and_rewards(turns, done, reward):
    replies, score = play(CalculatorEnvironment(), PROBLEM, turns)
    assert replies[-1].done is done
    assert score == reward


def test_an_environment_can_be_reset():
    environment = CalculatorEnvironment()
    assert play(environment, PROBLEM, ["#### 60"])[1] == 1.0
    assert play(environment, PROBLEM, ["<calc>60</calc>"])[1] == 0.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(), st.sampled_from(["<calc>1</calc>", "<calc>", "#### 60", "</calc>"])), max_size=5))
def test_fault_f2_nothing_the_environment_says_is_part_of_an_assistant_turn(turns):
    """Roles are kept apart, and no tool reply can hold an answer or a call of its own."""
    replies, score = play(CalculatorEnvironment(), PROBLEM, turns)
    for reply in replies:
        for message in reply.messages:
            assert message["role"] == "tool"
            assert "####" not in message["content"]
            assert "<calc>" not in message["content"]
    assert score in (0.0, 1.0)


def test_the_tools_text_earns_nothing():
    """The right number in a tool reply is no answer."""
    assert play(CalculatorEnvironment(), PROBLEM, ["<calc>12*5</calc>", "done"])[1] == 0.0


def kind_of(messages):
    """The kind of a demonstration, judged from the outside: by replaying it."""
    task = CalculatorTask()
    calls = [m["content"] for m in messages if "<calc>" in m["content"]]
    numbers, words = numbers_in(messages[0]["content"]), re.sub(r"\d+", "#", messages[0]["content"])
    for template in TEMPLATES:
        pattern = re.sub(r"\\\{[nm]\\\}|\\\{item\\\}", r"\\w+", re.escape(re.sub(r"\{[a-d]\}", "#", template.text)))
        if re.fullmatch(pattern, words):
            slots = re.findall(r"\{([a-d])\}", template.text)
            ordered = tuple(number for _, number in sorted(zip(slots, numbers, strict=True)))
            answer = WordProblem(template, ordered, ("Ann", "Ben"), "pens").answer
    environment = task.environment()
    environment.reset(Problem("d", messages[0]["content"], answer), 0)
    for said, heard in itertools.zip_longest(messages[1::2], messages[2::2]):
        assert said["role"] == "assistant"
        reply = environment.step(said["content"])
        assert reply.done == (heard is None)
        assert reply.messages == (() if heard is None else (heard,))
    if environment.reward() == 1.0:
        return "correct"
    return "wrong_argument" if calls else "no_call"


def test_demonstrations_have_the_named_shares():
    task = CalculatorTask()
    assert task.demonstration_shares() == pytest.approx({"correct": 0.4, "wrong_argument": 0.35, "no_call": 0.25})
    labelled = list(itertools.islice(task.labelled_demonstrations(0), 1500))
    kinds = [kind_of(messages) for _, messages in labelled]
    assert kinds == [label for label, _ in labelled]
    for kind, share in task.demonstration_shares().items():
        deviation = (share * (1 - share) / len(kinds)) ** 0.5
        assert abs(kinds.count(kind) / len(kinds) - share) < 4 * deviation


def test_demonstrations_are_endless_and_seeded():
    task = CalculatorTask()
    first = list(itertools.islice(task.demonstrations(5), 100))
    assert first == list(itertools.islice(CalculatorTask(seed=9).demonstrations(5), 100))
    assert first != list(itertools.islice(task.demonstrations(6), 100))
    assert [m["role"] for m in first[0]][:2] == ["user", "assistant"]


def test_demonstrations_without_flaws_all_pay():
    task = CalculatorTask(wrong_argument=0, no_call=0)
    assert task.demonstration_shares()["correct"] == 1.0
    assert {kind_of(m) for m in itertools.islice(task.demonstrations(0), 200)} == {"correct"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"levle": 1}, r"task 'calculator' has no option 'levle'; did you mean 'levels'\?"),
        ({"levels": [4]}, r"task\.levels .* must be a list of some of 1, 2, 3, not \[4\]"),
        ({"levels": []}, "a list of some of"),
        ({"levels": [1, 1]}, "a list of some of"),
        ({"levels": True}, "a list of some of"),
        ({"levels": "easy"}, "a list of some of"),
        ({"seed": -1}, "a whole number of at least 0"),
        ({"seed": 1.5}, "a whole number"),
        ({"no_call": 1.5}, r"a number in \[0, 1\]"),
        ({"no_call": float("nan")}, r"a number in \[0, 1\]"),
        ({"no_call": 0.7}, "together at most 1"),
        ({"latency": "slow"}, "one of none, fixed, lognormal, not 'slow'"),
        ({"latency_cap": float("inf")}, "a finite number"),
        ({"latency": "lognormal", "latency_median": 3.0}, r"task\.latency_median \(3\) must be above 0 and at most"),
        ({"shuffle_rewards": 1}, "true or false"),
    ],
)
def test_bad_options_are_named(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        CalculatorTask(**options)


def test_latency_is_reported_on_calls_only_and_follows_the_seed():
    environment = CalculatorTask(latency="fixed", latency_seconds=1.5).environment()
    replies, _ = play(environment, PROBLEM, ["<calc>1</calc>", "#### 60"])
    assert [reply.delay for reply in replies] == [1.5, 0.0]
    environment = CalculatorTask(latency="lognormal").environment()
    calls = ["<calc>1</calc>"] * 3
    delays = [[reply.delay for reply in play(environment, PROBLEM, calls, seed)[0]] for seed in (1, 1, 2)]
    assert delays[0] == delays[1] != delays[2]
    assert len(set(delays[0])) == 3
    assert CalculatorTask().environment().latency.draw(1, 1) == 0.0


def test_latency_quantiles():
    latency = Latency("lognormal", median=0.2, p99=2.0, cap=5.0)
    draws = sorted(latency.draw(seed, turn) for seed in range(5000) for turn in range(4))
    assert statistics.median(draws) == pytest.approx(0.2, rel=0.05)
    assert draws[int(0.99 * len(draws))] == pytest.approx(2.0, rel=0.15)
    assert draws[-1] == 5.0
    assert draws[0] > 0


def test_shuffled_rewards_carry_no_information_about_the_answer():
    """The coin depends on the episode's seed alone, has the set mean, and leaves held-out problems alone."""
    task = CalculatorTask(shuffle_rewards=True)
    problem = task.train_problem(0)
    right, wrong, silent = [f"#### {problem.answer}"], [f"#### {problem.answer + 1}"], ["?"]
    coins = [[play(task.environment(), problem, turns, s)[1] for s in range(2000)] for turns in (right, wrong, silent)]
    assert coins[0] == coins[1] == coins[2]
    assert abs(statistics.mean(coins[0]) - 0.4) < 4 * (0.24 / 2000) ** 0.5
    held_out = task.eval_problems(1)[0]
    assert play(task.environment(), held_out, [f"#### {held_out.answer}"])[1] == 1.0
    assert play(task.environment(), held_out, ["#### 0"])[1] == 0.0
