"""Task gsm8k: files, splits, epochs, annotations turned into calls; the real files where they are at hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from estr.environments import Task
from estr.environments.arithmetic import format_number
from estr.environments.gsm8k import INSTRUCTIONS, Gsm8kTask
from estr.environments.gsm8k_data import agreement, conversation, read_hub, read_jsonl, read_parquet
from estr.environments.verify import is_correct
from estr.errors import UsageError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the GSM8K files in {DATA}")

NATALIA = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many altogether?",
    "answer": "In May 48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def row(index):
    return {
        "question": f"What is {index} + 1?",
        "answer": f"It is <<{index}+1={index + 1}>>{index + 1}.\n#### {index + 1}",
    }


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def task_of(tmp_path, count=40, **options):
    return Gsm8kTask(path=write(tmp_path / "train.jsonl", map(row, range(count))), **options)


def test_a_worked_solution_becomes_turns_and_replies(tmp_path):
    (problem,) = read_jsonl(write(tmp_path / "a.jsonl", [NATALIA]))
    assert conversation(problem) == [
        {"role": "user", "content": NATALIA["question"]},
        {"role": "assistant", "content": "In May 48/2 = <calc>48/2</calc>"},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": "24 clips.\nTogether 48+24 = <calc>48+24</calc>"},
        {"role": "tool", "content": "72"},
        {"role": "assistant", "content": "72.\n#### 72"},
    ]
    assert conversation(problem, "Do it.")[0]["content"] == f"Do it.\n\n{NATALIA['question']}"


def test_a_disagreeing_annotation_gets_the_calculators_value(tmp_path):
    answer = "<<10/4=2>>2 and <<10//4=2>>2 and <<1/4=.25>>.25\n#### 2"
    rows = read_jsonl(write(tmp_path / "a.jsonl", [{"question": "q", "answer": answer}]))
    counts = agreement(rows)
    assert (counts.equal, counts.different, counts.refused) == (1, 1, 1)
    assert [m["content"] for m in conversation(rows[0])[1:]] == [
        "<calc>10/4</calc>", "2.5", "2 and 2 and <calc>1/4</calc>", "0.25", ".25\n#### 2",
    ]  # fmt: skip


def test_last_tenth_is_held_out(tmp_path):
    task = task_of(tmp_path)
    assert isinstance(task, Task)
    held_out = {problem.prompt for problem in task.eval_problems(99)}
    training = {task.train_problem(index).prompt for index in range(36)}
    assert len(held_out) == 4
    assert len(training) == 36
    assert not held_out & training
    assert task.eval_problems(2) == task.eval_problems(3)[:2]
    demonstrated = {m[0]["content"].split("\n\n")[1] for m in itertools.islice(task.demonstrations(0), 72)}
    assert demonstrated == training


def test_a_sibling_test_file_or_eval_path_is_held_out(tmp_path):
    write(tmp_path / "test.jsonl", [NATALIA])
    task = task_of(tmp_path)
    assert [p.answer for p in task.eval_problems(9)] == ["72"]
    assert len({task.train_problem(i).prompt for i in range(40)}) == 40
    other = write(tmp_path / "other.jsonl", [row(99)])
    assert [p.answer for p in task_of(tmp_path, eval_path=other).eval_problems(9)] == ["100"]
    alone = Gsm8kTask(path=write(tmp_path / "test.jsonl", map(row, range(20))))
    assert len(alone.eval_problems(99)) == 2


def test_epochs_are_permutations_of_their_own(tmp_path):
    task, again = task_of(tmp_path, seed=3), task_of(tmp_path, seed=3)
    again.train_problem(100)
    epochs = [[task.train_problem(e * 36 + i).task_id for i in range(36)] for e in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 36 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert epochs[1] == [again.train_problem(36 + i).task_id for i in range(36)]
    assert epochs[0] != [task_of(tmp_path, seed=4).train_problem(i).task_id for i in range(36)]


def test_an_episode_uses_the_instructions(tmp_path):
    task = task_of(tmp_path)
    problem, environment = task.train_problem(0), task.environment()
    assert environment.reset(problem, 0)[0]["content"] == f"{INSTRUCTIONS}\n\n{problem.prompt}"
    assert environment.step(f"I add. #### {problem.answer}").done
    assert environment.reward() == 1.0
    assert task_of(tmp_path, instructions="").environment().reset(problem, 0)[0]["content"] == problem.prompt


def test_filters(tmp_path):
    path = write(tmp_path / "train.jsonl", [NATALIA] * 2 + [row(i) for i in range(8)])
    task = Gsm8kTask(path=path, max_calls=1, max_problem_chars=20)
    assert {task.train_problem(i).task_id for i in range(20)} == {f"gsm8k-train-{line}" for line in range(3, 10)}
    with pytest.raises(UsageError, match="no training problem"):
        Gsm8kTask(path=path, max_problem_chars=3)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"question": "q", "answer": ', "line 2: not a JSON object in UTF-8"),
        (b"[" * 100_000, "line 2: not a JSON object in UTF-8"),
        (b'{"question": "\xff", "answer": "#### 1"}', "line 2: not a JSON object in UTF-8"),
        (b'["q", "#### 1"]', "line 2: expected a JSON object"),
        (b'{"question": "q"}', "line 2: the field 'answer' is missing"),
        (b'{"question": 3, "answer": "#### 1"}', "line 2: the field 'question' is missing or not a text"),
        (b'{"question": " ", "answer": "#### 1"}', "line 2: the field 'question'"),
        (b'{"question": "q", "answer": "it is 4"}', "line 2: 'answer' does not end in a line '#### number'"),
        (b'{"question": "q", "answer": "#### four"}', "line 2: 'answer' does not end"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, line, sentence):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(NATALIA).encode() + b"\n" + line + b"\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl, " + sentence):
        Gsm8kTask(path=str(path))


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read task\.path .*No such file"):
        Gsm8kTask(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match=r"cannot read task\.path"):
        Gsm8kTask(path=str(tmp_path))
    with pytest.raises(UsageError, match="no training problem"):
        Gsm8kTask(path=write(tmp_path / "empty.jsonl", []))
    with pytest.raises(UsageError, match="did you mean 'eval_path'"):
        Gsm8kTask(path="x", evalpath="y")


def test_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(NATALIA).encode() + b"\r\n\r\n" + json.dumps(row(1)).encode())
    assert [r.line for r in read_jsonl(path)] == [1, 3]


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([NATALIA, row(1)]), path)
    assert [int(r.number) for r in read_parquet(path)] == [72, 2]
    parquet.write_table(pyarrow.Table.from_pylist([NATALIA, {"question": "q", "answer": None}]), path)
    with pytest.raises(UsageError, match=r"a\.parquet, line 2: the field 'answer'"):
        read_parquet(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(UsageError, match="cannot read"):
        read_parquet(path)


def test_offline_without_a_path_is_a_usage_error(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot get openai/gsm8k .* set task\.path to a local JSONL file"):
        read_hub("train")
    with pytest.raises(UsageError, match="cannot get openai/gsm8k"):
        Gsm8kTask()


@needs_data
def test_all_published_rows_parse_and_the_calculator_agrees():
    train, test = read_jsonl(DATA / "train.jsonl"), read_jsonl(DATA / "test.jsonl")
    assert (len(train), len(test)) == (7473, 1319)
    counts = agreement(train + test)
    assert (counts.equal, counts.different, counts.refused) == (27_995, 1, 2)
    for problem in train + test:
        messages = conversation(problem)
        assert is_correct(messages[-1]["content"], format_number(problem.number))
        assert not any("<<" in message["content"] for message in messages)


@needs_data
def test_published_solutions_replayed_in_the_environment_all_pay():
    task = Gsm8kTask(path=str(DATA / "train.jsonl"))
    answers = {problem.prompt: problem for problem in map(task.train_problem, range(7473))}
    environment = task.environment()
    for messages in itertools.islice(task.demonstrations(0), 1000):
        problem = answers[messages[0]["content"].split("\n\n", 1)[1]]
        assert environment.reset(problem, 0) == messages[:1]
        for said, heard in itertools.zip_longest(messages[1::2], messages[2::2]):
            reply = environment.step(said["content"])
            assert reply.messages == (() if heard is None else (heard,))
        assert environment.reward() == 1.0
    assert len(task.eval_problems(5000)) == 1319
