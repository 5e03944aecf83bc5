"""checkpoints/: whole or not there, torn ones recognized, nothing pickled."""

import errno
import json
import math
import os
import pickletools
import resource
import shutil

import pytest
import torch

from estr.config import Config
from estr.errors import RunError
from estr.storage import checkpoints, files
from estr.storage.checkpoints import (
    Best,
    best_checkpoint,
    checkpoint_path,
    checkpoint_steps,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    retain_checkpoints,
    save_checkpoint,
    withdraw_checkpoints_after,
)
from estr.storage.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run", Config()) as made:
        yield made


@pytest.fixture(scope="module")
def model_and_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    config = Qwen3Config(tie_word_embeddings=True, pad_token_id=0, bos_token_id=0, eos_token_id=1, **sizes)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return Qwen3ForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")


def save(run, step, value=1.0, **state):
    return save_checkpoint(run, step, None, None, {"moment": torch.full((3,), value)}, state)


def visible(run):
    return sorted(entry.name for entry in run.checkpoints.iterdir())


def test_a_checkpoint_is_a_model_directory_and_the_state(run, model_and_tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = model_and_tokenizer
    state = {"step": 50, "best": math.nan, "limit": -math.inf, "seed": 2**63 - 1, "nested": {"list": [1, (2, 3)]}}
    tensors = {"exp_avg": torch.arange(4.0), "rng": torch.get_rng_state()}
    path = save_checkpoint(run, 50, model, tokenizer, tensors, state, kind="periodic")
    assert path == run.checkpoints / "step-000050"
    latest, notices = latest_checkpoint(run)
    assert (latest.path, latest.step, latest.kind, notices) == (path, 50, "periodic", [])
    assert math.isnan(latest.state.pop("best"))
    assert latest.state == {"step": 50, "limit": -math.inf, "seed": 2**63 - 1, "nested": {"list": [1, [2, 3]]}}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in latest.tensors().items())
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(path).get_vocab() == {"a": 0, "b": 1}


def test_a_tied_model_is_stored_once(run, model_and_tokenizer):
    from safetensors import safe_open

    path = save_checkpoint(run, 1, *model_and_tokenizer, {}, {})
    with safe_open(path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_tensors_that_share_memory_are_stored_apart(run):
    flat = torch.arange(6.0)
    save_checkpoint(run, 1, None, None, {"a": flat[:3], "b": flat[3:], "t": flat.view(2, 3).t()}, {})
    stored = latest_checkpoint(run).checkpoint.tensors()
    assert stored["b"].tolist() == [3, 4, 5]
    assert stored["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(run):
    with pytest.raises(TypeError, match="cannot be stored as JSON"):
        save(run, 1, thing=object())
    assert visible(run) == []


def assert_no_pickle(path):
    data = path.read_bytes()
    assert path.suffix not in (".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy", ".npz"), path
    assert not data.startswith(b"PK\x03\x04"), f"{path} is a zip archive, as torch.save makes them"
    with pytest.raises((ValueError, IndexError, UnicodeDecodeError)):
        list(pickletools.genops(data))
    for protocol in (b"\x80\x02", b"\x80\x03", b"\x80\x04\x95", b"\x80\x05\x95"):
        assert not data.startswith(protocol), path


def test_no_pickle_in_a_run_directory(run, model_and_tokenizer):
    save_checkpoint(run, 1, *model_and_tokenizer, {"rng": torch.get_rng_state()}, {"a": 1})
    mark_best(run, 1, 0.5)
    found = [path for path in run.path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(found) >= 6
    for path in found:
        assert_no_pickle(path)


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest cut", "manifest edited", "no manifest"])
def test_a_torn_checkpoint_is_passed_over_with_a_line(run, damage):
    save(run, 10, mark="ten")
    path = save(run, 20, mark="twenty")
    tensors, manifest = path / "trainer.safetensors", path / "trainer.json"
    content = tensors.read_bytes()
    if damage == "cut":
        tensors.write_bytes(content[:-1])
    elif damage == "flip":
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "remove":
        tensors.unlink()
    elif damage == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif damage == "manifest edited":
        manifest.write_text(manifest.read_text().replace("twenty", "thirty"))
    else:
        manifest.unlink()
    latest, (notice,) = latest_checkpoint(run)
    assert (latest.step, latest.state) == (10, {"mark": "ten"})
    assert "step-000020 is torn (" in notice
    with pytest.raises(RunError, match="cannot be used"):
        load_checkpoint(path)
    assert load_checkpoint(checkpoint_path(run, 10)).step == 10


def test_a_checkpoint_under_another_name_is_recognized(run):
    shutil.copytree(save(run, 1), checkpoint_path(run, 2))
    latest, (notice,) = latest_checkpoint(run)
    assert latest.step == 1
    assert "is that of step 1" in notice


def test_without_checkpoints_there_is_none(run):
    assert latest_checkpoint(run) == (None, [])
    assert best_checkpoint(run) is None


def test_the_same_step_again_replaces(run):
    save(run, 5, mark=1)
    save(run, 5, mark=2)
    assert visible(run) == ["step-000005"]
    assert latest_checkpoint(run).checkpoint.state == {"mark": 2}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_disk_leaves_the_old_checkpoint(run, monkeypatch, code, call, failing):
    save(run, 5, mark="old")
    real, calls = getattr(os, call), []

    def fail(*arguments, **named):
        calls.append(arguments)
        if len(calls) > failing:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    failure = ""
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        try:
            save(run, 5, mark="new")
        except RunError as error:
            failure = str(error)
    assert failure == "" or failure.startswith("cannot write the checkpoint")
    latest, notices = latest_checkpoint(run)
    assert latest.state["mark"] in (("old", "new") if failure else ("new",))
    assert notices == []
    assert visible(run) == ["step-000005"]


def killed(action):
    """Run ``action``, which must end in ``os._exit(9)``, in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_for_the_tokenizer_is_a_sentence(run, model_and_tokenizer):
    """The library raises a plain Exception."""

    class Full:
        def save_pretrained(self, directory):
            model_and_tokenizer[1].backend_tokenizer.save("/dev/full")

    save(run, 1)
    with pytest.raises(RunError, match=r"cannot write the checkpoint .*step-000002: the disk is full"):
        save_checkpoint(run, 2, None, Full(), {}, {})
    assert visible(run) == ["step-000001"]


def test_a_file_size_limit_is_a_sentence_and_leaves_nothing(run):
    def save_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            save_checkpoint(run, 1, None, None, {"big": torch.zeros(10_000)}, {})
        except RunError as error:
            os._exit(9 if "cannot write the checkpoint" in str(error) else 2)

    killed(save_too_much)
    assert visible(run) == []


@pytest.mark.parametrize("moment", ["write", "fsync", "before rename", "between renames", "after rename"])
def test_a_kill_leaves_a_whole_checkpoint(run, moment):
    save(run, 5, mark="old")
    write, rename = os.write, os.rename

    def killing_rename(source, target):
        published = str(target).endswith("/step-000005")
        if moment == "before rename" and not str(target).endswith(".json"):
            os._exit(9)
        rename(source, target)
        if published or (moment == "between renames" and ".old-" in str(target)):
            os._exit(9)

    def save_and_die():
        if moment == "write":
            os.write = lambda descriptor, data: write(descriptor, data[:20]) and os._exit(9)
        elif moment == "fsync":
            os.fsync = lambda descriptor: os._exit(9)
        else:
            os.rename = killing_rename
        save(run, 5, mark="new")

    killed(save_and_die)
    latest, notices = latest_checkpoint(run)
    assert latest.state["mark"] == ("new" if moment == "after rename" else "old")
    assert notices == []
    assert visible(run) == ["step-000005"]


def test_a_reader_without_the_lock_tidies_nothing(run):
    save(run, 1)
    (run.checkpoints / ".tmp-step-000002-x").mkdir()
    assert latest_checkpoint(RunDirectory.open(run.path)).checkpoint.step == 1
    assert ".tmp-step-000002-x" in visible(run)


def test_the_best_is_marked_and_read(run):
    save(run, 1)
    mark_best(run, 1, 0.75)
    assert best_checkpoint(run) == Best(1, 0.75)
    with pytest.raises(ValueError, match="no checkpoint"):
        mark_best(run, 2, 0.8)
    (run.checkpoints / "best.json").write_text("{")
    assert best_checkpoint(run) is None


def test_retention_keeps_the_newest_the_best_and_the_protected(run):
    for step in range(1, 8):
        save(run, step)
    mark_best(run, 2, 0.9)
    assert retain_checkpoints(run, 2, protect=[4]) == [6, 7]
    assert checkpoint_steps(run) == [2, 4, 6, 7]
    assert retain_checkpoints(run, 1) == [7]
    assert checkpoint_steps(run) == [2, 7]


def test_retention_does_not_count_torn_checkpoints(run):
    for step in range(1, 5):
        save(run, step)
    (checkpoint_path(run, 4) / "trainer.safetensors").unlink()
    (checkpoint_path(run, 2) / "trainer.safetensors").unlink()
    assert retain_checkpoints(run, 1) == [3]
    assert latest_checkpoint(run).checkpoint.step == 3
    assert checkpoint_steps(run) == [3, 4]


def test_a_kill_during_retention_leaves_no_torn_checkpoint(run):
    for step in (1, 2):
        save(run, step)

    def half(path, **_):
        os.unlink(os.path.join(path, "trainer.json"))
        os._exit(9)

    def retain_and_die():
        shutil.rmtree = half
        retain_checkpoints(run, 1)

    killed(retain_and_die)
    assert checkpoint_steps(run) == [2]
    assert latest_checkpoint(run).notices == []
    assert visible(run) == ["step-000002"]


def test_withdrawal_removes_later_checkpoints_and_their_best_marker(run):
    for step in (1, 2, 3):
        save(run, step)
    mark_best(run, 3, 0.9)
    withdraw_checkpoints_after(run, 2)
    assert checkpoint_steps(run) == [1, 2]
    assert best_checkpoint(run) is None
    assert not (run.checkpoints / "best.json").exists()


def test_the_manifest_is_strict_json(run):
    path = save(run, 1, value=math.nan, inf=math.inf)

    def refuse(name):
        raise AssertionError(name)

    json.loads((path / "trainer.json").read_text(), parse_constant=refuse)
    assert checkpoints.load_checkpoint(path).state["inf"] == math.inf
