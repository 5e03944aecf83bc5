"""The ledger: issued → finished → trained or dropped, durable, exactly once, and back to a checkpoint."""

import contextlib
import json
import math
import os
import resource
import sqlite3
import threading
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from estr.errors import RunError
from estr.storage.ledger import Ledger
from estr.storage.ledger_rows import packed
from estr.storage.ledger_schema import key_of
from estr.storage.spool import decode_trajectory, encode_trajectory
from estr.trajectory import Segment, Trajectory, derive_seed

SIZE = 2


def made(group, sibling, attempt=0, length=4, **values):
    action = np.arange(length) % 2 == 1
    floats = np.where(action, np.float32(-0.5 - group), np.float32("nan")).astype(np.float32)
    segment = Segment(
        np.arange(length, dtype=np.int32), action, floats, -floats, np.where(action, 3, -1).astype(np.int32)
    )
    return Trajectory(group, sibling, attempt, f"task-{group}", "2+2?", derive_seed(0, group, sibling, attempt),
                      [segment], **values)  # fmt: skip


def issue(ledger, group, sibling, attempt=0):
    about = made(group, sibling, attempt)
    return ledger.issue(group, sibling, attempt, seed=about.seed, group_size=SIZE, task_id=about.task_id, prompt="2+2?")


def issue_group(ledger, group):
    return [issue(ledger, group, sibling) for sibling in range(SIZE)]


def finish_group(ledger, group):
    for sibling in range(SIZE):
        ledger.finish(made(group, sibling))


def train_group(ledger, group, step):
    names = issue_group(ledger, group)
    finish_group(ledger, group)
    ledger.settle(names, step)
    return names


def dump(ledger):
    return ledger.history(), [encode_trajectory(one) for one in ledger.finished()], ledger.next_group


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "spool" / "ledger.sqlite") as opened:
        yield opened


# ---------------------------------------------------------------------- the payload


def equal(a: Trajectory, b: Trajectory) -> bool:
    return encode_trajectory(a) == encode_trajectory(b)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.booleans(), st.floats(width=32))), max_size=3),
    st.text(),
    st.floats(),
)
def test_payloads_read_back_as_they_were(rows, text, reward):
    segments = [
        Segment(
            np.array([token for token, _, _ in row], np.int32),
            np.array([action for _, action, _ in row], np.bool_),
            np.array([value for _, _, value in row], np.float32),
            np.array([value for _, _, value in row], np.float32),
            np.array([token for token, _, _ in row], np.int32),
        )
        for row in rows
    ]
    before = Trajectory(1, 2, 3, text, text, 2**63 - 1, segments, text, reward, "stop", 2, text, 1, text)
    after = decode_trajectory(encode_trajectory(before))
    assert (after.trajectory_id, after.text, after.seed, after.error) == (before.trajectory_id, text, 2**63 - 1, text)
    assert after.reward == reward or (math.isnan(after.reward) and math.isnan(reward))
    for a, b in zip(after.segments, segments, strict=True):
        for column in ("tokens", "action", "logprob", "entropy", "version"):
            one, other = getattr(a, column), getattr(b, column)
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("length", [0, 1, 100, 481, 482, 3000])
def test_payloads_are_zlib_streams_whatever_their_size(length):
    trajectory = made(0, 0, length=length)
    payload = encode_trajectory(trajectory)
    head, _, columns = zlib.decompress(payload).partition(b"\n")
    assert len(columns) == 17 * length
    assert json.loads(head)["lengths"] == [length]
    assert equal(decode_trajectory(payload), trajectory)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=4))
@example(1, b"\x9c")
@example(2, b"\t")
def test_damaged_payloads_are_recognized_or_mean_the_same(position, damage):
    """zlib's header and the first byte of deflate have bits that do not count (RFC 1950, 2.2; RFC 1951, 3.2.4)."""
    payload = encode_trajectory(made(0, 0))
    broken = payload[:position] + damage + payload[position + len(damage) :]
    try:
        found = decode_trajectory(broken)
    except ValueError:
        return
    assert equal(found, made(0, 0))
    assert position < 3 or broken == payload


def test_a_payload_that_unpacks_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("estr.storage.spool._MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="cut off, or larger"):
        decode_trajectory(encode_trajectory(made(0, 0, length=1000)))


# ---------------------------------------------------------------------- one life


def test_a_life(ledger):
    names = issue_group(ledger, 0)
    assert names == ["00000000-000", "00000000-001"]
    assert [one.trajectory_id for one in ledger.in_flight()] == names
    ledger.finish(made(0, 0))
    assert [one.trajectory_id for one in ledger.in_flight()] == names[1:]
    assert [one.trajectory_id for one in ledger.finished()] == names[:1]
    assert equal(ledger.finished()[0], made(0, 0))
    ledger.finish(made(0, 1))
    ledger.settle(names, 1)
    assert ledger.counts() == {"issued": 0, "finished": 0, "trained": 2, "dropped": 0}
    assert ledger.history() == [(names[0], "trained", 1, None), (names[1], "trained", 1, None)]
    assert ledger.next_group == 1


def test_in_flight_tells_all_that_is_needed_to_issue_again(ledger):
    ledger.issue(4, 1, seed=2**63 - 1, group_size=3, task_id="t", prompt="p\ud800", group_key="k", version=7)
    (one,) = ledger.in_flight()
    assert (one.group, one.sibling, one.attempt, one.seed, one.group_size) == (4, 1, 0, 2**63 - 1, 3)
    assert (one.task_id, one.prompt, one.group_key, one.version, one.issues) == ("t", "p?", "k", 7, 1)
    ledger.issue(4, 1, seed=2**63 - 1, group_size=3, task_id="t")
    assert ledger.in_flight()[0].issues == 2
    assert one.trajectory().trajectory_id == one.trajectory_id == "00000004-001"


def test_a_failed_attempt_is_dropped_before_the_next(ledger):
    issue_group(ledger, 0)
    with pytest.raises(RunError, match="another attempt at it is not dropped"):
        issue(ledger, 0, 0, attempt=1)
    with ledger.batch():
        ledger.drop("00000000-000", "the tool hung", 1, made(0, 0))
        issue(ledger, 0, 0, attempt=1)
    assert ledger.attempts(0) == {0: 1, 1: 0}
    assert [one.attempt for one in ledger.in_flight()] == [1, 0]
    assert ledger.history()[0] == ("00000000-000", "dropped", 1, "the tool hung")
    assert equal(ledger.load("00000000-000"), made(0, 0))


def test_a_group_is_dropped_with_all_that_is_live(ledger):
    issue_group(ledger, 3)
    ledger.finish(made(3, 1))
    dropped = ledger.drop_group(3, "sibling 0 failed", 5)
    assert [len(one.segments) for one in dropped] == [0, 1]
    assert [(state, step) for _, state, step, _ in ledger.history()] == [("dropped", 5)] * 2
    assert ledger.drop_group(3, "again", 6) == []


def refused(ledger, action, words):
    before = dump(ledger)
    with pytest.raises(RunError, match=words):
        action()
    assert dump(ledger) == before


def test_what_must_not_happen_is_refused_and_changes_nothing(ledger):
    names = train_group(ledger, 0, 1)
    issue_group(ledger, 1)
    refused(ledger, lambda: ledger.settle(names, 2), r"00000000-000 \(it is trained in step 1\)")
    refused(ledger, lambda: ledger.finish(made(0, 0, length=8)), "it is trained")
    refused(ledger, lambda: ledger.drop(names[0], "late", 2), "it is trained")
    refused(ledger, lambda: ledger.settle(["00000001-000"], 2), r"it is issued\)")
    refused(ledger, lambda: ledger.finish(made(9, 0)), "never issued")
    refused(ledger, lambda: ledger.settle(["nonsense"], 2), "never issued")
    refused(ledger, lambda: ledger.drop("nonsense", "", 2), "never issued")
    refused(ledger, lambda: issue(ledger, 1, SIZE), "beyond the size of its group")
    refused(ledger, lambda: issue(ledger, 0, 0), "UNIQUE")
    refused(ledger, lambda: ledger.issue(1, 0, seed=1, group_size=5, task_id="task-1"), "group 1 as 2 trajectories")
    refused(ledger, lambda: ledger.issue(1, 0, seed=1, group_size=SIZE, task_id="task-1"), "UNIQUE")
    refused(ledger, lambda: ledger.issue(5, 0, seed=1, group_size=0), "CHECK")
    ledger.finish(made(1, 0))
    refused(ledger, lambda: ledger.finish(made(1, 0)), r"it is finished\)")
    refused(ledger, lambda: ledger.forget_groups(0), "2 were trained")


def test_a_group_is_not_trained_short(ledger):
    issue_group(ledger, 0)
    ledger.finish(made(0, 0))
    refused(ledger, lambda: ledger.settle(["00000000-000"], 1), "group 0 would be trained with 1 of its 2")


def test_a_group_is_issued_together_and_again_after_a_resume(ledger):
    about = {"group_size": 3, "task_id": "t", "prompt": "p?", "group_key": "t"}
    ledger.issue_group(0, [(0, 0, 11), (1, 0, 12)], **about)
    ledger.issue_group(0, [(0, 0, 11), (2, 0, 13)], **about)
    assert [(one.sibling, one.seed, one.issues) for one in ledger.in_flight()] == [(0, 11, 2), (1, 12, 1), (2, 13, 1)]
    refused(ledger, lambda: ledger.issue_group(0, [(0, 0, 11), (1, 0, 99)], **about), r"00000000-001 \(it is issued\)")
    refused(ledger, lambda: ledger.issue_group(0, [(0, 0, 11), (3, 0, 14)], **about), "beyond the size of its group")
    refused(ledger, lambda: ledger.issue_group(0, [(0, 0, 11), (1, 1, 15)], **about), "is not dropped")


def test_of_several_results_the_refused_one_is_named_and_none_is_filed(ledger):
    issue_group(ledger, 0)
    issue_group(ledger, 1)
    ledger.drop("00000001-000", "gone", 1)
    refused(
        ledger, lambda: ledger.finish(made(0, 0), made(1, 0), made(0, 1)), r"00000001-000 \(it is dropped in step 1\)"
    )
    refused(ledger, lambda: ledger.finish(made(0, 0), made(7, 0)), "00000007-000: it was never issued")
    refused(ledger, lambda: ledger.finish(made(0, 0), made(0, 0)), r"00000000-000 \(it is finished\)")
    ledger.finish(made(0, 0), made(0, 1))
    refused(ledger, lambda: ledger.keep_packed_turns([packed(made(1, 1), {}), packed(made(0, 1), {})]), "is in flight")
    refused(ledger, lambda: ledger.settle(["00000000-000", "00000000-000", "00000000-001"], 1), "it is trained")


def test_results_that_are_too_much_for_one_statement(ledger, monkeypatch):
    monkeypatch.setattr("estr.storage.ledger_rows._MOST_BYTES", 1000)
    trajectories = [made(group, sibling, length=40 + group) for group in range(4) for sibling in range(SIZE)]
    for group in range(4):
        issue_group(ledger, group)
    ledger.keep_packed_turns([packed(one, {"turn": one.group}) for one in trajectories])
    assert [context["turn"] for _, context in ledger.turns()] == [one.group for one in trajectories]
    ledger.finish(*trajectories)
    assert all(map(equal, ledger.finished(), trajectories))
    assert ledger.turns() == []


def test_the_database_itself_refuses_what_the_program_must_not_do(ledger):
    train_group(ledger, 0, 1)
    issue_group(ledger, 1)
    ledger.finish(made(1, 0))
    raw = sqlite3.connect(ledger.path)
    for statement in (
        "UPDATE trajectories SET state = 'finished', step = NULL WHERE state = 'trained'",
        "UPDATE trajectories SET state = 'trained', step = 1 WHERE state = 'issued'",
        "UPDATE trajectories SET state = 'finished' WHERE id = '00000001-001'",
        "UPDATE trajectories SET state = 'gone'",
        "DELETE FROM trajectories WHERE state = 'issued'",
        "UPDATE trajectories SET seed = 1 WHERE id = '00000001-001'",
        "INSERT INTO trajectories (key, id, number, sibling, attempt, seed) VALUES (4294967297, '', 1, 0, 1, 1)",
        f"DELETE FROM spool WHERE key = {key_of(1, 0, 0)}",
        f"DELETE FROM spool WHERE key = {key_of(0, 0, 0)}",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(statement)
    raw.close()


# ---------------------------------------------------------------------- transactions


def test_a_batch_is_all_or_nothing(ledger):
    with contextlib.suppress(ZeroDivisionError), ledger.batch():
        issue_group(ledger, 0)
        raise ZeroDivisionError
    assert ledger.history() == []
    with ledger.batch():
        issue_group(ledger, 0)
        with contextlib.suppress(RunError):
            ledger.finish(made(7, 0))
        ledger.finish(made(0, 0))
    assert ledger.counts()["finished"] == 1


def test_a_swallowed_error_inside_a_batch_leaves_no_trace(ledger):
    issue_group(ledger, 0)
    ledger.finish(made(0, 0))
    with ledger.batch():
        with contextlib.suppress(RunError):
            ledger.finish(made(0, 0, length=8))
        issue_group(ledger, 1)
    assert equal(ledger.finished()[0], made(0, 0))
    assert ledger.next_group == 2


def test_a_batch_in_which_nothing_happens_leaves_the_disk_alone(ledger):
    statements = []
    ledger._connection.set_trace_callback(statements.append)
    with ledger.batch():
        pass
    assert statements == []


def test_a_refused_result_inside_a_batch_leaves_no_tokens(ledger):
    issue_group(ledger, 0)
    ledger.drop("00000000-000", "gone", 1)
    with ledger.batch():
        with pytest.raises(RunError, match="it is dropped in step 1"):
            ledger.finish(made(0, 0))
        with pytest.raises(RunError, match="never issued"):
            ledger.finish(made(7, 0))
        ledger.finish(made(0, 1))
    assert ledger.load("00000000-000").segments == []
    assert ledger._query("SELECT key FROM spool") == [(key_of(0, 1, 0),)]


def test_a_group_that_was_undone_is_not_taken_for_known(ledger):
    with contextlib.suppress(ZeroDivisionError), ledger.batch():
        issue(ledger, 0, 0)
        raise ZeroDivisionError
    issue_group(ledger, 0)
    assert ledger.counts()["issued"] == SIZE
    ledger.forget_groups(0)
    issue_group(ledger, 0)
    refused(ledger, lambda: ledger.issue(0, 0, 1, seed=1, group_size=9, task_id="task-0"), "group 0 as 2 trajectories")


def test_numbers_beyond_what_a_key_holds_are_refused(ledger):
    refused(ledger, lambda: ledger.issue(0, 0, 1 << 12, seed=1, group_size=SIZE), "cannot number trajectory")
    refused(ledger, lambda: ledger.issue(1 << 31, 0, seed=1, group_size=SIZE), "cannot number trajectory")
    with pytest.raises(RunError, match="does not know"):
        ledger.load("00000000-000.4096")


def test_a_batch_is_not_seen_from_outside_before_its_end(ledger):
    with ledger.batch():
        issue_group(ledger, 0)
        reader = sqlite3.connect(ledger.path)
        assert reader.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
    assert reader.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (2,)
    reader.close()


def test_several_threads(ledger):
    def work(first):
        for group in range(first, first + 5):
            issue_group(ledger, group)
            finish_group(ledger, group)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ledger.counts()["finished"] == 15 * SIZE


def test_it_is_durable_in_the_strict_sense(ledger):
    assert ledger._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (2,)


# ---------------------------------------------------------------------- checkpoints and resume


def test_rewind_counts_later_training_as_finished_again(ledger):
    for group in range(3):
        train_group(ledger, group, step=group + 1)
    issue_group(ledger, 3)
    ledger.commit(1)
    rewind = ledger.rewind_to(1, {"next_group": 1, "trained": SIZE})
    assert rewind.finished_again == ["00000001-000", "00000001-001", "00000002-000", "00000002-001"]
    assert [one.group for one in rewind.in_flight] == [3, 3]
    assert [one.seed for one in rewind.in_flight] == [made(3, 0).seed, made(3, 1).seed]
    assert all(equal(one, made(one.group, one.sibling)) for one in ledger.finished())
    assert ledger.next_group == 4
    ledger.settle(["00000001-000", "00000001-001"], 2)


def test_rewind_to_the_start(ledger):
    train_group(ledger, 0, 1)
    assert ledger.rewind_to(0).finished_again == ["00000000-000", "00000000-001"]
    assert ledger.counts()["finished"] == 2


def test_rewind_lists_drops_whose_rows_were_withdrawn(ledger):
    issue_group(ledger, 0)
    ledger.drop("00000000-000", "early", 2, made(0, 0))
    issue(ledger, 0, 0, attempt=1)
    ledger.drop("00000000-000.1", "late", 3)
    (dropped,) = ledger.rewind_to(2).dropped
    assert (dropped.trajectory.trajectory_id, dropped.reason) == ("00000000-000.1", "late")
    assert dropped.trajectory.prompt == "2+2?"
    assert [one.reason for one in ledger.rewind_to(2).dropped] == ["late"]
    assert [one.reason for one in ledger.rewind_to(1).dropped] == ["early", "late"]


def test_commit_prunes_only_what_no_resume_needs(ledger):
    for group in range(4):
        train_group(ledger, group, step=group + 1)
    ledger.commit(3, prune_through=2)
    assert ledger.load("00000001-000").segments == []
    assert equal(ledger.load("00000002-000"), made(2, 0))
    refused(ledger, lambda: ledger.rewind_to(1), "resume from a checkpoint of step 2 or later")
    assert ledger.rewind_to(2).finished_again[0] == "00000002-000"


def test_a_checkpoint_of_another_run_is_refused(ledger):
    train_group(ledger, 0, 1)
    train_group(ledger, 1, 2)
    refused(ledger, lambda: ledger.rewind_to(1, {"next_group": 1, "trained": 5}), "do not fit")


def test_forgetting_a_cohort(ledger):
    train_group(ledger, 0, 1)
    issue_group(ledger, 1)
    finish_group(ledger, 1)
    issue_group(ledger, 2)
    ledger.drop("00000002-001", "x", 2)
    ledger.forget_groups(1)
    assert ledger.next_group == 1
    assert len(ledger.history()) == SIZE
    issue_group(ledger, 1)
    assert ledger.in_flight()[0].issues == 1


# ---------------------------------------------------------------------- kills and failing disks


def in_child(action, code=9):
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_fault_E2_resume_goes_on_after_what_was_consumed(tmp_path):
    """The loader ran ten groups ahead, three were consumed: each group is trained once, none is skipped."""
    path = tmp_path / "ledger.sqlite"

    def first_run():
        ledger = Ledger(path)
        for group in range(13):
            issue_group(ledger, group)
        for group in range(3):
            finish_group(ledger, group)
            ledger.settle([made(group, sibling).trajectory_id for sibling in range(SIZE)], group + 1)
        ledger.commit(3)
        os._exit(9)

    in_child(first_run)
    ledger = Ledger(path)
    rewind = ledger.rewind_to(3)
    assert sorted({one.group for one in rewind.in_flight}) == list(range(3, 13))
    assert ledger.next_group == 13
    for step, group in enumerate(range(3, 13), start=4):
        finish_group(ledger, group)
        ledger.settle([made(group, sibling).trajectory_id for sibling in range(SIZE)], step)
    assert [(state, step) for _, state, step, _ in ledger.history()] == [
        ("trained", step) for step in range(1, 14) for _ in range(SIZE)
    ]


def test_fault_E3_what_finished_is_trained_exactly_once_after_a_kill(tmp_path):
    """Killed after generation and before training: nothing is generated again, nothing trained twice."""
    path = tmp_path / "ledger.sqlite"

    def first_run():
        ledger = Ledger(path)
        train_group(ledger, 0, 1)
        ledger.commit(1)
        train_group(ledger, 1, 2)
        issue_group(ledger, 2)
        finish_group(ledger, 2)
        os._exit(9)

    in_child(first_run)
    ledger = Ledger(path)
    rewind = ledger.rewind_to(1)
    assert rewind.in_flight == []
    assert rewind.finished_again == ["00000001-000", "00000001-001"]
    assert [one.group for one in ledger.finished()] == [1, 1, 2, 2]
    ledger.settle([one.trajectory_id for one in ledger.finished()], 2)
    assert [(state, step) for _, state, step, _ in ledger.history()] == [
        ("trained", step) for step in (1, 1, 2, 2, 2, 2)
    ]


def test_a_kill_inside_a_batch_undoes_it_whole(tmp_path):
    path = tmp_path / "ledger.sqlite"

    def die():
        ledger = Ledger(path)
        issue_group(ledger, 0)
        with ledger.batch():
            finish_group(ledger, 0)
            ledger.settle(["00000000-000", "00000000-001"], 1)
            os._exit(9)

    in_child(die)
    assert Ledger(path).counts() == {"issued": 2, "finished": 0, "trained": 0, "dropped": 0}


def test_a_full_disk_is_reported_and_changes_nothing(ledger):
    issue_group(ledger, 0)
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    big = made(0, 0)
    big.text = os.urandom(200_000).hex()
    refused(ledger, lambda: ledger.finish(big), "the disk is full")
    ledger._connection.execute("PRAGMA max_page_count = 100000")
    ledger.finish(big)
    assert ledger.finished()[0].text == big.text


def test_a_file_that_may_not_grow_is_reported_and_changes_nothing(tmp_path):
    path = tmp_path / "ledger.sqlite"

    def die():
        ledger = Ledger(path)
        issue_group(ledger, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        big = made(0, 0)
        big.text = os.urandom(200_000).hex()
        try:
            ledger.finish(big)
        except RunError:
            os._exit(9)

    in_child(die)
    ledger = Ledger(path)
    assert ledger.counts()["issued"] == 2
    finish_group(ledger, 0)


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be read as one" * 40, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_that_is_no_ledger_is_a_sentence(tmp_path, content):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"ledger\.sqlite failed: it is"):
        Ledger(path)


def test_a_ledger_of_another_format_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    raw.commit()
    raw.close()
    with pytest.raises(RunError, match="another version of estr"):
        Ledger(path)


def test_a_damaged_payload_is_a_sentence(ledger):
    issue_group(ledger, 0)
    ledger.finish(made(0, 0))
    ledger._connection.execute("UPDATE spool SET payload = x'00'")
    with pytest.raises(RunError, match="is damaged"):
        ledger.finished()


# ---------------------------------------------------------------------- the log moved by another thread


def alone(path, folder):
    """What the database file holds without its log."""
    copy = folder / "copy.sqlite"
    copy.write_bytes(path.read_bytes())
    with contextlib.closing(sqlite3.connect(copy)) as database:
        return database.execute("SELECT COUNT(*) FROM trajectories").fetchone()[0]


def test_the_log_is_moved_into_the_database_without_a_commit(ledger, tmp_path):
    ledger.move_log()
    for group in range(3):
        train_group(ledger, group, 1)
    ledger.move_log()
    assert alone(ledger.path, tmp_path) == 3 * SIZE


def test_the_log_is_moved_between_batches(ledger, tmp_path):
    train_group(ledger, 0, 1)
    with ledger.batch():
        issue_group(ledger, 1)
        mover = threading.Thread(target=ledger.move_log)
        mover.start()
        mover.join(0.2)
        assert mover.is_alive()
    mover.join(60)
    assert alone(ledger.path, tmp_path) == 2 * SIZE
    assert ledger.counts()["issued"] == SIZE


def test_the_log_of_a_closed_ledger_is_not_moved(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    train_group(ledger, 0, 1)
    ledger.close()
    ledger.move_log()
    assert alone(ledger.path, tmp_path) == SIZE


def test_a_log_that_another_reader_holds_back_stays_and_is_moved_later(ledger, tmp_path):
    train_group(ledger, 0, 1)
    with contextlib.closing(sqlite3.connect(ledger.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM trajectories").fetchall()
        train_group(ledger, 1, 2)
        ledger.move_log()
        assert ledger.counts()["trained"] == 2 * SIZE
    ledger.move_log()
    assert alone(ledger.path, tmp_path) == 2 * SIZE


def test_issuing_a_group_again_costs_the_same_in_a_long_ledger(ledger):
    work = []
    ledger._connection.set_progress_handler(lambda: work.append(1) and None, 100)
    for groups in (2, 600):
        for group in range(ledger.next_group, groups):
            issue_group(ledger, group)
        work.clear()
        issue_group(ledger, 1)
        if groups == 2:
            least = len(work)
    assert len(work) <= least + 2


def test_issuing_a_group_again_with_other_numbers_is_refused(ledger):
    about = {"group_size": SIZE, "task_id": "task-0"}
    ledger.issue_group(0, [(0, 0, 11)], **about)
    with pytest.raises(RunError, match="has group 0 as 2 trajectories"):
        ledger.issue_group(0, [(1, 0, 12)], group_size=SIZE + 1, task_id="task-0")
    assert ledger.history() == [("00000000-000", "issued", None, None)]


def test_the_ledger_of_another_run_is_refused_and_nothing_changes(tmp_path):
    """Two ledgers of the same history: only the number that each has of its own tells them apart."""

    def filled(name):
        made_here = Ledger(tmp_path / name)
        train_group(made_here, 0, 1)
        return made_here

    one, other = filled("one.sqlite"), filled("other.sqlite")
    position = one.position()
    assert {**other.position(), "ledger": position["ledger"]} == position
    refused(other, lambda: other.rewind_to(1, position), "is not the one that the checkpoint of step 1")
    assert one.rewind_to(1, position).finished_again == []
    del position["ledger"]  # as older versions wrote it
    assert other.rewind_to(1, position).finished_again == []


def test_bits_that_make_a_row_what_it_must_not_be_are_found(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        issue_group(ledger, 0)
        ledger.check_whole()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
    content = path.read_bytes()
    at = content.index(b"issued", content.index(b"00000000-000"))  # of the row, not of the tables' definitions
    path.write_bytes(content[:at] + b"iswued" + content[at + 6 :])
    with Ledger(path) as ledger, pytest.raises(RunError, match=r"is damaged \(CHECK constraint failed.*from a copy"):
        ledger.check_whole()
