"""The gradient of one optimizer step: against a plain padded loop, and the same for any split into micro-batches."""

import copy

import numpy as np
import pytest
import torch

from estr.advantages import reweighting
from estr.controllers import regularizer
from estr.learner import Extensions, Learner
from estr.learner.minibatch import Minibatch
from estr.learner.rollouts import Rollouts
from learner_helpers import (
    assert_same_gradients,
    gradients,
    near_policy,
    plain_values,
    random_groups,
    segment,
    settings,
    tiny_model,
    trajectory,
)


def accumulate(learner: Learner, groups, advantage=None, fresh=True, version=0):
    """Gradients and what was seen of one step over all groups, without an update."""
    config = learner.config
    rollouts = Rollouts.of(groups, config.learner)
    if advantage is None:
        rollouts.estimate(learner._estimator)
    else:
        rollouts.advantage = torch.tensor(advantage)
    learner._freeze(rollouts, [list(range(len(groups)))])
    budget, share = config.learner.tokens_per_microbatch, learner._share
    minibatch = Minibatch.of(rollouts, list(range(len(groups))), budget, learner.device, share=share)
    learner.optimizer.zero_grad()
    seen = learner._gradient(minibatch, version, fresh, seed=0)
    return gradients(learner.model), seen, minibatch


def padded(model, groups):
    """log π [B, T−1], its mask, log μ, H and each row's advantage, from a padded batch and the library's attention."""
    rows = [(row, member) for group in groups for member in group for row in member.segments]
    longest = max(len(row.tokens) for row, _ in rows)
    tokens, mask, attend, mu, entropy = (np.zeros((len(rows), longest)) for _ in range(5))
    for i, (row, _) in enumerate(rows):
        n = len(row.tokens)
        tokens[i, :n], mask[i, :n], attend[i, :n] = row.tokens, row.action, 1
        mu[i, :n], entropy[i, :n] = np.nan_to_num(row.logprob), np.nan_to_num(row.entropy)
    ids = torch.tensor(tokens, dtype=torch.int64)
    logits = model(ids, attention_mask=torch.tensor(attend, dtype=torch.int64)).logits[:, :-1]
    logprob = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    columns = [torch.tensor(x[:, 1:], dtype=torch.float32) for x in (mask, mu, entropy)]
    advantage = []
    for group in groups:
        rewards = torch.tensor([t.reward for t in group], dtype=torch.float64)
        normalized = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        advantage += [float(a) for a, t in zip(normalized, group, strict=True) for _ in t.segments]
    return logprob, *columns, torch.tensor(advantage)[:, None]


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_equals_a_plain_padded_loop(tied: bool) -> None:
    """ESTR written out over a padded batch: keep δ² / (H + eps) <= tau, clip on E, mean over all action tokens."""
    groups = random_groups()
    reference = tiny_model(tied=tied).eval()
    near_policy(reference, groups)
    model = copy.deepcopy(reference)
    logprob, mask, mu, entropy, advantage = padded(reference, groups)
    delta = logprob - mu
    keep = (delta.detach() ** 2 / (entropy + 0.01) <= 0.05).float() * mask
    ratio = (delta * mask).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    (-(surrogate * keep).sum() / mask.sum()).backward()
    assert 0.05 < float(keep.sum() / mask.sum()) < 0.95
    learner = Learner(model, settings(objective={"recipe": "estr", "tau": 0.05}, learner={"tokens_per_microbatch": 30}))
    got, _, minibatch = accumulate(learner, groups)
    assert len(minibatch.microbatches) > 2
    assert_same_gradients(got, gradients(reference))


def test_fault_D5_the_tied_head_and_the_embedding_are_one_gradient() -> None:
    """The gradient of the tied weight is that through the head plus that through the embedding."""
    groups = random_groups(1)
    tied = tiny_model(tied=True)
    near_policy(tied, groups)
    apart = copy.deepcopy(tied)
    apart.config.tie_word_embeddings = False
    apart.lm_head.weight = torch.nn.Parameter(tied.model.embed_tokens.weight.detach().clone())
    a, _, _ = accumulate(Learner(tied, settings()), groups)
    b, _, _ = accumulate(Learner(apart, settings()), groups)
    both = b.pop("lm_head.weight") + b.pop("model.embed_tokens.weight")
    assert float(both.abs().max()) > 0
    assert_same_gradients(a, b | {"model.embed_tokens.weight": both})
    with torch.no_grad():
        tied.model.embed_tokens.weight += 0.1
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)


RECIPES = [
    {"recipe": "grpo"},
    {"recipe": "estr"},
    {"recipe": "estr", "denominator": "kept"},
    {"recipe": "icepop", "denominator": "kept"},
    {"recipe": "reinforce"},
    {"recipe": "estr", "kl_coef": 0.5},
    {"recipe": "grpo", "kl_coef": 0.5, "kl_estimator": "k1"},
    {"recipe": "estr", "advantage": "reinforce_pp", "advantage_options": {"gamma": 0.9}},
    {"recipe": "gspo"},
    {"recipe": "sat"},
    {"recipe": "m2po"},
    {"recipe": "vespo"},
]


@pytest.mark.parametrize("options", RECIPES, ids=lambda o: "-".join(map(str, o.values())))
def test_any_split_into_microbatches_gives_the_same_gradient(options: dict) -> None:
    groups = random_groups(seed=3)
    model = tiny_model()
    near_policy(model, groups)
    results = []
    for budget in (4096, 70, 1):
        config = settings(objective=options, learner={"tokens_per_microbatch": budget})
        learner = Learner(
            copy.deepcopy(model), config, reference=tiny_model(seed=1) if options.get("kl_coef") else None
        )
        results.append(accumulate(learner, groups))
    assert [len(m.microbatches) for _, _, m in results] == [1, pytest.approx(4, abs=2), 12]
    for got, seen, _ in results[1:]:
        assert_same_gradients(got, results[0][0])
        assert seen.metrics == pytest.approx(results[0][1].metrics, rel=1e-4, abs=1e-6)


EXTENSIONS = {
    "stare": lambda: Extensions(reweighting=reweighting("stare", target_entropy=99.0)),
    "papo": lambda: Extensions(reweighting=reweighting("papo", reference="initial", tau=2.0)),
    "papo-proxy": lambda: Extensions(reweighting=reweighting("papo", response="proxy", reference="initial", tau=2.0)),
    "gtpo": lambda: Extensions(reweighting=reweighting("gtpo")),
    "aer": lambda: Extensions(regularizer=regularizer("aer", initial_alpha=0.1, rho=1.0)),
    "tecrl": lambda: Extensions(regularizer=regularizer("tecrl", initial_alpha=0.1)),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions_act_and_give_the_same_gradient_for_any_split(name: str) -> None:
    groups = random_groups(seed=3)
    model = tiny_model()
    near_policy(model, groups)
    plain, _, _ = accumulate(Learner(copy.deepcopy(model), settings()), groups)
    results = []
    for budget in (4096, 70):
        config = settings(learner={"tokens_per_microbatch": budget})
        results.append(accumulate(Learner(copy.deepcopy(model), config, extensions=EXTENSIONS[name]()), groups))
    assert_same_gradients(results[1][0], results[0][0])
    with pytest.raises(AssertionError):
        assert_same_gradients(results[0][0], plain, tolerance=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_prompt_gives_the_gradient_of_one_read_by_every_sibling(checkpointing: bool) -> None:
    groups, model = random_groups(seed=5), tiny_model()
    near_policy(model, groups)
    results = []
    for share in (False, True):
        config = settings(
            model={"gradient_checkpointing": checkpointing},
            learner={"tokens_per_microbatch": 60, "share_prompts": share},
        )
        results.append(accumulate(Learner(copy.deepcopy(model), config), groups))
    (apart, one, rows), (together, other, fewer) = results
    read = [sum(len(m.tokens) for m in found.microbatches) for found in (rows, fewer)]
    assert read[1] < 0.9 * read[0]
    assert_same_gradients(together, apart)
    assert sorted(torch.cat(one.logprob).tolist()) == pytest.approx(sorted(torch.cat(other.logprob).tolist()), abs=1e-5)


def test_fault_B15_the_token_mean_is_over_the_whole_batch() -> None:
    """Five tokens of loss 1 in one micro-batch, one token of loss 4 in the other: 1.5, not 2.5."""
    long, short = segment([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1]), segment([7, 8], [0, 1])
    groups = [[trajectory(long), trajectory(short, sibling=1)]]
    model = tiny_model()
    near_policy(model, groups, noise=0.0)
    for budget, parts in ((4096, 1), (5, 2)):
        learner = Learner(copy.deepcopy(model), settings(learner={"tokens_per_microbatch": budget}))
        _, seen, minibatch = accumulate(learner, groups, advantage=[-1.0, -4.0])
        assert len(minibatch.microbatches) == parts
        assert seen.loss == pytest.approx(1.5, abs=1e-5)


@pytest.mark.parametrize(("rule", "loss", "rows"), [("keep", 1.0, 2), ("mask", 0.5, 1), ("penalize", 1.0, 2)])
def test_fault_B3_cut_off_trajectories_leave_the_numerator_only(rule: str, loss: float, rows: int) -> None:
    """Two sequences of loss 1, one of them cut off: masked, it still counts in the denominator."""
    whole, cut = segment([1, 2, 3], [0, 1, 1]), segment([4, 5, 6], [0, 1, 1])
    groups = [[trajectory(whole), trajectory(cut, sibling=1, finish="length")]]
    model = tiny_model()
    near_policy(model, groups, noise=0.0)
    _, seen, minibatch = accumulate(
        Learner(model, settings(learner={"truncated": rule})), groups, advantage=[-1.0, -1.0]
    )
    assert seen.loss == pytest.approx(loss, abs=1e-5)
    assert len(minibatch.learning) == rows
    assert (minibatch.token_count, minibatch.sequence_count) == (4, 2)


def test_fault_B3_penalized_trajectories_lose_reward_before_the_baseline() -> None:
    row = segment([1, 2], [0, 1])
    group = [
        trajectory(row, reward=1.0, finish=finish, sibling=i) for i, finish in enumerate(["stop", "length", "turns"])
    ]
    config = settings(learner={"truncated": "penalize", "truncation_penalty": 0.25}).learner
    assert Rollouts.of([group], config).reward.tolist() == [1.0, 0.75, 0.75]
    assert Rollouts.of([group], settings(learner={"truncated": "mask"}).learner).reward.tolist() == [1.0] * 3


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_fault_B21_no_ratio_multiplies_the_divergence(estimator: str) -> None:
    """A sequence ratio of 2: the gradient that kl_coef adds is that of the divergence alone."""
    groups = [[trajectory(segment([1, 2, 3], [0, 1, 1])), trajectory(segment([4, 5], [0, 1]), sibling=1)]]
    model, reference = tiny_model(), tiny_model(seed=1)
    near_policy(model, groups, noise=0.0)
    for member in groups[0]:
        member.segments[0].logprob -= np.float32(np.log(2.0) / member.action_count)
    results = []
    for coef in (0.0, 1.0):
        config = settings(objective={"recipe": "grpo", "kl_coef": coef, "kl_estimator": estimator, "clip_high": 9.0})
        learner = Learner(copy.deepcopy(model), config, reference=reference)
        results.append(accumulate(learner, groups, advantage=[1.0, 1.0])[0])
    added = {name: results[1][name] - results[0][name] for name in results[0]}
    plain = copy.deepcopy(model)
    rows = [member.segments[0] for member in groups[0]]
    log_pi = torch.cat([plain_values(plain, row)[0] for row in rows])
    x = torch.cat([plain_values(reference, row)[0] for row in rows]).detach() - log_pi
    # the derivative of -x is 0 in expectation: k1 has its value and the gradient of x²/2
    (x.square() / 2 if estimator == "k1" else x.exp() - 1 - x).mean().backward()
    assert_same_gradients(added, gradients(plain), tolerance=1e-4)


def test_fault_C5_the_denominator_is_not_recomputed() -> None:
    """log μ is the recorded one: after the weights moved, ratios differ from 1."""
    groups = random_groups(1)
    model = tiny_model()
    near_policy(model, groups, noise=0.0)
    learner = Learner(model, settings())
    assert accumulate(learner, groups)[1].metrics["mismatch/ratio_deviation"] == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        model.model.norm.weight += 0.5
    assert accumulate(learner, groups)[1].metrics["mismatch/ratio_deviation"] > 0.05


def test_bfloat16_autocast_keeps_float32_weights_and_is_close() -> None:
    groups = random_groups(1)
    model = tiny_model()
    near_policy(model, groups)
    exact, _, _ = accumulate(Learner(copy.deepcopy(model), settings()), groups)
    learner = Learner(copy.deepcopy(model), settings(learner={"dtype": "bfloat16"}))
    low, _, _ = accumulate(learner, groups)
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    assert_same_gradients(low, exact, tolerance=0.2)
    with pytest.raises(AssertionError):
        assert_same_gradients(low, exact)


def test_weights_loaded_in_bfloat16_become_float32_masters() -> None:
    learner = Learner(tiny_model().bfloat16(), settings())
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    accumulate(learner, random_groups(1))
