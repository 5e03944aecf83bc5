"""The local engine against direct computation: log μ, H, versions, parking, precision, in-flight weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from estr.engines.local import EngineSettings, LocalEngine, Turn
from estr.engines.sampler import sample, uniforms
from estr.trajectory import Segment

VOCABULARY, END = 97, 96


def make_model(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        **changes,
    )
    return Qwen3ForCausalLM(config)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_engine(model: Qwen3ForCausalLM | None = None, **changes: object) -> LocalEngine:
    model = model or make_model()
    values = {"slots": 4, "parked": 4, "max_context": 200, "end_ids": (END,)} | changes
    engine = LocalEngine(model, EngineSettings(**values))  # type: ignore[arg-type]
    engine.set_weights(0, state(model))
    return engine


def run(engine: LocalEngine) -> list[Turn]:
    turns = []
    while engine.busy:
        turns += engine.step()
    return turns


def direct(model: Qwen3ForCausalLM, segment: Segment, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """log π and H of the action tokens from the model's own full forward pass."""
    ids = torch.from_numpy(segment.tokens).long()[None]
    with torch.no_grad():
        logprob = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    entropy = -(logprob.exp() * logprob).sum(-1)
    at = np.flatnonzero(segment.action) - 1
    picked = logprob[at, ids[0, at + 1]]
    return picked.numpy(), entropy[at].numpy()


def check(model: Qwen3ForCausalLM, segment: Segment, temperature: float = 1.0) -> None:
    logprob, entropy = direct(model, segment, temperature)
    np.testing.assert_allclose(segment.logprob[segment.action], logprob, atol=1e-4)
    np.testing.assert_allclose(segment.entropy[segment.action], entropy, atol=1e-4)
    assert np.isnan(segment.logprob[~segment.action]).all()
    assert np.isnan(segment.entropy[~segment.action]).all()
    assert (segment.version[~segment.action] == -1).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ragged_prompts_equal_a_full_forward_pass(temperature: float) -> None:
    model = make_model()
    engine = make_engine(model, temperature=temperature)
    for i in range(11):
        engine.start(f"k{i}", list(range(3 + i, 5 + 3 * i)), seed=i, limit=5 + i)
    turns = run(engine)
    assert sorted(turn.key for turn in turns) == sorted(f"k{i}" for i in range(8))
    released = {}
    for turn in turns:
        released[turn.key] = engine.release(turn.key)
    for turn in run(engine):
        released[turn.key] = engine.release(turn.key)
    assert len(released) == 11
    for segment in released.values():
        check(model, segment, temperature)


def test_turns_end_by_end_token_or_limit() -> None:
    engine = make_engine()
    for i in range(30):
        engine.start(f"k{i}", [1, 2, 3], seed=i, limit=40)
    ends = {}
    while engine.running:
        for turn in engine.step():
            ends[turn.key] = turn
            segment = engine.release(turn.key)
            assert segment.tokens[segment.action].tolist() == turn.tokens
    assert {turn.end for turn in ends.values()} == {"stop", "length"}
    for turn in ends.values():
        assert (turn.tokens[-1] == END) == (turn.end == "stop")
        assert END not in turn.tokens[:-1]
        assert len(turn.tokens) == 40 or turn.end == "stop"


def test_parked_conversations_go_on_without_recomputing_their_prefix() -> None:
    model = make_model()
    engine = make_engine(model)
    for i in range(6):
        engine.start(f"k{i}", [5, 6, 7 + i], seed=i, limit=4)
    before = None
    for round_ in range(3):
        turns = run(engine)
        assert len(turns) == 6
        before = engine.counters.prefilled_tokens
        if round_ < 2:
            for turn in turns:
                assert engine.extend(turn.key, [11, 12, 13, 14], seed=round_, limit=3 + round_)
    assert before == 6 * 3 + 2 * 6 * 5, "each reply is prefilled with the one sampled token before it, no more"
    for i in range(6):
        segment = engine.release(f"k{i}")
        assert segment.action.sum() == 4 + 3 + 4 or END in segment.tokens
        check(model, segment)


def test_siblings_share_the_prefill_of_their_prompt() -> None:
    model = make_model()
    engine = make_engine(model, slots=8)
    prompt = list(range(20))
    for i in range(8):
        engine.start(f"k{i}", prompt, seed=i, limit=6)
    run(engine)
    assert engine.counters.prefilled_tokens == 20
    assert engine.counters.shared_tokens == 7 * 20
    texts = set()
    for i in range(8):
        segment = engine.release(f"k{i}")
        texts.add(tuple(segment.tokens))
        check(model, segment)
    assert len(texts) > 1


def test_later_siblings_copy_a_prompt_that_another_still_holds() -> None:
    model = make_model()
    engine = make_engine(model, slots=2, parked=0, prefill_rows=1)
    prompt = list(range(20))
    for i in range(6):
        engine.start(f"k{i}", prompt, seed=i, limit=3 + 2 * i)
    while engine.busy:
        for turn in engine.step():
            check(model, engine.release(turn.key))
    assert engine.counters.prefilled_tokens == 20
    assert engine.counters.shared_tokens == 5 * 20


def test_fault_D1_a_sibling_after_a_sync_does_not_copy_the_old_prompt() -> None:
    engine = make_engine(make_model(0))
    engine.start("a", [1, 2, 3], seed=0, limit=30)
    engine.step()
    engine.set_weights(1, state(make_model(1)))
    engine.start("b", [1, 2, 3], seed=1, limit=5)
    run(engine)
    assert engine.counters.shared_tokens == 0
    check(make_model(1), engine.release("b"))


def test_a_row_that_went_on_elsewhere_is_no_source_of_its_old_prompt() -> None:
    model = make_model()
    engine = make_engine(model)
    engine.start("a", [1, 2, 3], seed=0, limit=4)
    run(engine)
    engine.fork("a", [1, 7, 8, 9], seed=1, limit=30)
    engine.step()
    engine.start("b", [1, 2, 3], seed=2, limit=5)
    run(engine)
    check(model, engine.release("b"))
    check(model, engine.release("a"))


def test_a_later_turn_of_a_row_does_not_change_its_prompt() -> None:
    model = make_model()
    engine = make_engine(model)
    engine.start("a", [1, 2, 3], seed=0, limit=4)
    run(engine)
    engine.extend("a", [7, 8], seed=1, limit=4)
    run(engine)
    engine.start("b", [1, 2, 3], seed=2, limit=5)
    run(engine)
    assert engine.counters.shared_tokens == 3
    check(model, engine.release("b"))


def test_few_pending_rows_wait_for_others_but_not_long() -> None:
    engine = make_engine(slots=8, prefill_rows=3, prefill_wait=2, end_ids=())
    engine.start("a", [1, 2, 3], seed=0, limit=50)
    engine.step()
    engine.start("b", [4, 5, 6], seed=0, limit=50)
    sampled = []
    for _ in range(4):
        before = engine.counters.prefilled_tokens
        engine.step()
        sampled.append(engine.counters.prefilled_tokens - before)
    assert sampled == [0, 0, 3, 0]
    for i in range(3):
        engine.start(f"c{i}", [7, 8, i], seed=0, limit=50)
    before = engine.counters.prefilled_tokens
    engine.step()
    assert engine.counters.prefilled_tokens - before == 9, "enough of them do not wait"


def test_a_seed_decides_a_trajectory_whatever_runs_beside_it() -> None:
    alone = make_engine()
    alone.start("x", [1, 2, 3], seed=42, limit=20)
    run(alone)
    expected = alone.release("x")
    crowd = make_engine()
    for i in range(3):
        crowd.start(f"k{i}", [9, 9, i], seed=i, limit=7)
    crowd.start("x", [1, 2, 3], seed=42, limit=20)
    run(crowd)
    assert crowd.release("x").tokens.tolist() == expected.tokens.tolist()


def flipping_weights(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Weights under which other tokens are likely: the vocabulary's rows rolled by one."""
    flipped = state(model)
    flipped["model.embed_tokens.weight"] = flipped["model.embed_tokens.weight"].roll(1, 0)
    return flipped


def test_new_weights_reach_the_middle_of_a_generation() -> None:
    """The argmax flips with the next token; earlier tokens keep their version; nothing is restarted."""
    model = make_model()
    new = state(model)
    engine = make_engine(model, temperature=0.0)
    engine.start("x", [1, 2, 3], seed=0, limit=30)
    for _ in range(4):
        engine.step()
    sampled_before = engine.counters.sampled_tokens
    new["model.norm.weight"] = -new["model.norm.weight"]
    engine.set_weights(1, new)
    engine.step()
    row = engine._rows["x"].index
    segment_tokens = engine._store.tokens[row, : int(engine._store.length[row])].tolist()
    versions = engine._store.version[row, : int(engine._store.length[row])].tolist()
    assert engine.counters.sampled_tokens == sampled_before + 1
    assert versions == [-1, -1, -1, *[0] * sampled_before, 1]
    unchanged = make_engine(make_model(), temperature=0.0)
    unchanged.start("x", [1, 2, 3], seed=0, limit=30)
    run(unchanged)
    expected = unchanged.release("x").tokens.tolist()
    assert segment_tokens[:-1] == expected[: len(segment_tokens) - 1]
    assert segment_tokens[-1] != expected[len(segment_tokens) - 1], "the sign of the final norm flips the argmax"


def replay(models: dict[int, Qwen3ForCausalLM], segment: Segment) -> np.ndarray:
    """Teacher-forced log μ where position p is computed under the version of the next action after p (kv = keep)."""
    from transformers import DynamicCache

    cache, logprobs, start = DynamicCache(), [], 0
    ids = torch.from_numpy(segment.tokens).long()
    for at in np.flatnonzero(segment.action):
        model = models[int(segment.version[at])]
        with torch.no_grad():
            output = model(ids[None, start:at], cache=cache, use_cache=True)
        logprobs.append(float(torch.log_softmax(output.logits[0, -1].float(), -1)[ids[at]]))
        start = int(at)
    return np.array(logprobs)


def test_kept_cache_replays_under_the_versions_of_each_token() -> None:
    models = {version: make_model(version) for version in range(4)}
    engine = make_engine(models[0])
    for i in range(4):
        engine.start(f"k{i}", [4, 5, 6 + i], seed=i, limit=12)
    version, turns = 0, []
    for step in range(40):
        turns += engine.step()
        if step % 4 == 3 and version < 3:
            version += 1
            engine.set_weights(version, state(make_model(version)))
        if step == 20:
            for turn in turns:
                engine.extend(turn.key, [30, 31], seed=9, limit=5)
    fresh = {version: make_model(version) for version in range(4)}
    for i in range(4):
        segment = engine.release(f"k{i}")
        assert len(set(segment.version[segment.action].tolist())) > 1
        np.testing.assert_allclose(segment.logprob[segment.action], replay(fresh, segment), atol=1e-4)


def test_recomputed_cache_equals_the_new_weights_alone() -> None:
    engine = make_engine(make_model(0), kv="recompute")
    engine.start("x", [4, 5, 6], seed=3, limit=16)
    for _ in range(5):
        engine.step()
    engine.set_weights(1, state(make_model(1)))
    run(engine)
    segment = engine.release("x")
    new = segment.action & (segment.version == 1)
    assert new.sum() >= 3
    logprob, _ = direct(make_model(1), segment, 1.0)
    np.testing.assert_allclose(segment.logprob[new], logprob[segment.version[segment.action] == 1], atol=1e-4)


def test_imposed_versions_decide_row_by_row() -> None:
    models = {version: make_model(version) for version in range(6)}
    engine = make_engine(make_model(0))
    for version in range(1, 6):
        engine.weights.add(version, state(make_model(version)))

    def rule(target: int) -> Callable[[int], int]:
        return lambda action: max(0, target - max(0, 3 - action // 2))

    for i in range(4):
        engine.start(f"k{i}", [4, 5, 6 + i], seed=i, limit=10, rule=rule(2 + i))
    run(engine)
    for i in range(4):
        segment = engine.release(f"k{i}")
        count = int(segment.action.sum())
        assert segment.version[segment.action].tolist() == [rule(2 + i)(a) for a in range(count)]
        np.testing.assert_allclose(segment.logprob[segment.action], replay(models, segment), atol=1e-4)


def test_recomputed_cache_follows_imposed_versions() -> None:
    """Each token equals a full forward pass under its own version, also across a tool turn."""
    engine = make_engine(make_model(0), kv="recompute")
    for version in range(1, 5):
        engine.weights.add(version, state(make_model(version)))
    for i in range(4):
        engine.start(f"k{i}", [4, 5, 6 + i], seed=i, limit=6, rule=lambda action: min(4, action // 3))
    for turn in run(engine):
        engine.extend(turn.key, [30, 31], seed=9, limit=5)
    run(engine)
    for i in range(4):
        segment = engine.release(f"k{i}")
        versions = segment.version[segment.action]
        assert versions.tolist() == [min(4, action // 3) for action in range(len(versions))]
        for version in sorted(set(versions.tolist())):
            logprob, entropy = direct(make_model(version), segment, 1.0)
            mine = versions == version
            np.testing.assert_allclose(segment.logprob[segment.action][mine], logprob[mine], atol=1e-4)
            np.testing.assert_allclose(segment.entropy[segment.action][mine], entropy[mine], atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_engine_precision_makes_a_real_mismatch(dtype: str) -> None:
    model = make_model()
    reference = make_model()
    engine = make_engine(model, dtype=dtype)
    engine.start("x", [1, 2, 3], seed=1, limit=40)
    run(engine)
    segment = engine.release("x")
    logprob, _ = direct(reference, segment, 1.0)
    error = np.abs(segment.logprob[segment.action] - logprob)
    assert 1e-5 < error.mean() < 1.0


def test_context_limit_ends_a_turn_and_a_long_prompt_is_refused() -> None:
    engine = make_engine(max_context=16, end_ids=())
    engine.start("x", list(range(10)), seed=0, limit=100)
    turns = run(engine)
    assert [turn.end for turn in turns] == ["context"]
    assert not engine.extend("x", [1], seed=0, limit=5)
    assert len(engine.release("x").tokens) == 16
    with pytest.raises(ValueError, match="leaves no room"):
        engine.start("y", list(range(16)), seed=0, limit=1)


def test_a_fork_closes_the_row_and_goes_on_from_another_history() -> None:
    model = make_model()
    engine = make_engine(model)
    engine.start("x", [1, 2, 3], seed=0, limit=4)
    run(engine)
    first = engine.fork("x", [1, 2, 50, 51, 52], seed=1, limit=5)
    run(engine)
    second = engine.release("x")
    assert first is not None
    assert first.tokens[:3].tolist() == [1, 2, 3]
    assert second.tokens[:5].tolist() == [1, 2, 50, 51, 52]
    for segment in (first, second):
        check(model, segment)


def test_cancel_frees_a_row_in_any_state() -> None:
    model = make_model()
    engine = make_engine(model, slots=2, parked=1, end_ids=())
    for i in range(5):
        engine.start(f"k{i}", [1, 2, i], seed=i, limit=6)
    engine.step()
    for key in ("k0", "k2", "k4", "unknown"):
        engine.cancel(key)
    turns = run(engine)
    assert sorted(turn.key for turn in turns) == ["k1", "k3"]
    for key in ("k1", "k3"):
        check(model, engine.release(key))
    assert engine.running == 0


def test_fault_A1_A15_logprob_and_entropy_are_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    got = sample(logits, 0.5, torch.tensor([0.1], dtype=torch.float64))
    assert got.token.item() == 0
    assert got.logprob.item() == pytest.approx(-0.01815, abs=1e-5)
    assert got.entropy.item() == pytest.approx(0.090, abs=5e-4)
    assert sample(logits, 2.0, torch.zeros(1, dtype=torch.float64)).entropy.item() == pytest.approx(0.582, abs=5e-4)


def test_fault_A13_entropy_is_of_the_whole_distribution() -> None:
    logits = torch.log(torch.tensor([[0.9, 0.1]]))
    got = sample(logits, 1.0, torch.tensor([0.95], dtype=torch.float64))
    assert got.token.item() == 1
    assert got.entropy.item() == pytest.approx(0.325, abs=5e-4)
    uniform = sample(torch.zeros(1, 1000), 1.0, torch.zeros(1, dtype=torch.float64))
    assert uniform.entropy.item() == pytest.approx(6.908, abs=5e-4)


def test_sampling_inverts_the_cumulative_distribution_exactly() -> None:
    probability = torch.tensor([0.2, 0.0, 0.5, 0.3])
    count = 10_000
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    got = sample(torch.log(probability).expand(count, -1), 1.0, u).token
    assert (torch.bincount(got, minlength=4) / count).tolist() == pytest.approx([0.2, 0.0, 0.5, 0.3], abs=2e-4)
    edge = sample(torch.log(probability)[None], 1.0, torch.tensor([0.2], dtype=torch.float64)).token.item()
    assert edge != 1, "a token of probability 0 is never drawn"


def test_uniforms_depend_on_the_seed_alone() -> None:
    assert uniforms(7, 5).tolist() == uniforms(7, 9)[:5].tolist()
    assert uniforms(7, 5).tolist() != uniforms(8, 5).tolist()


def test_fault_D1_a_prompt_after_a_sync_is_computed_under_the_new_weights() -> None:
    engine = make_engine(make_model(0))
    engine.start("a", [1, 2, 3], seed=0, limit=5)
    run(engine)
    check(make_model(0), engine.release("a"))
    engine.set_weights(1, state(make_model(1)))
    engine.start("b", [1, 2, 3], seed=0, limit=5)
    run(engine)
    check(make_model(1), engine.release("b"))


def test_fault_D2_canary_shows_wrong_weights() -> None:
    engine = make_engine(make_model(0))
    tokens = [3, 1, 4, 1]
    with torch.no_grad():
        logprob = torch.log_softmax(make_model(0)(torch.tensor([tokens])).logits[0].float(), -1)
    expected = logprob[torch.arange(3), torch.tensor(tokens[1:])].numpy()
    assert np.abs(engine.canary(tokens) - expected).max() < 1e-4
    engine.set_weights(1, flipping_weights(make_model(0)))
    assert np.abs(engine.canary(tokens) - expected).max() > 1e-3


def test_fault_D5_weights_with_a_missing_name_are_refused() -> None:
    engine = make_engine(make_model(0))
    short = state(make_model(1))
    short.popitem()
    with pytest.raises(ValueError, match="differ"):
        engine.set_weights(1, short)
    assert engine.version == 0
