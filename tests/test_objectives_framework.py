"""What every recipe does alike: names and values, missing fields, empty batches, micro-batches, metrics."""

import math
from dataclasses import fields

import pytest
import torch

from estr import TokenBatch, objective, recipes
from estr.objectives import Composition, Gate, merge_metrics, register, surrogates
from estr.objectives.metrics import NAMES
from objective_fixtures import close, column, everything, f8, token

ALL = list(recipes())
LIVE = ("logprob", "entropy", "topk_logprob")


def without(batch, *names):
    """The batch with some fields taken away."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return TokenBatch(**{**values, **dict.fromkeys(names)}, advantage_scope="token")


def leaves(batch):
    return [getattr(batch, name) for name in LIVE]


def gradients(loss, batch):
    found = torch.autograd.grad(loss, leaves(batch), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves(batch), strict=True)]


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"icepopp.*icepop"):
        objective("icepopp")


def test_unknown_hyperparameter_names_the_nearest():
    with pytest.raises(ValueError, match=r"estr.*taus.*tau"):
        objective("estr", taus=1)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("estr", {"tau": -1}),
        ("estr", {"tau": "1"}),
        ("estr", {"tau": float("nan")}),
        ("estr", {"tau": True}),
        ("estr", {"tau": None}),
        ("estr", {"undecided": "maybe"}),
        ("estr", {"denominator": "some"}),
        ("grpo", {"clip_low": -0.1}),
        ("grpo", {"dual_clip": 0.5}),
        ("icepop", {"low": 6}),
        ("kpop", {"weight": 1}),
        ("sat", {"alpha": 1.5}),
        ("sat", {"hill": "gaussian"}),
        ("pdm", {"tail": "uniform"}),
        ("espo", {"vocabulary": 10.5}),
        ("verl/decoupled_token_is", {"rollout_is_threshold": "a_b"}),
        ("verl/decoupled_token_is", {"rollout_is_threshold": "5_2"}),
        ("verl/decoupled_token_is", {"rollout_is_threshold": None}),
        ("verl/decoupled_geo_rs", {"rollout_rs": "seq_mean_k4"}),
        ("verl/decoupled_geo_rs", {"rollout_rs_threshold": None}),
    ],
)
def test_values_are_checked(recipe, options):
    with pytest.raises(ValueError, match=recipe):
        objective(recipe, **options)


@pytest.mark.parametrize("name", ALL)
def test_infinity_is_refused_where_it_would_make_the_loss_infinite(name):
    """Where it is allowed it switches a bound off: loss and gradient stay finite."""
    for hyperparameter in recipes()[name].hyperparameters:
        try:
            chosen = objective(name, **{hyperparameter: math.inf})
        except ValueError as error:
            assert hyperparameter in str(error)  # noqa: PT017 - either outcome is right
            continue
        batch = everything()
        out = chosen(batch, generator=torch.Generator().manual_seed(0))
        assert out.loss.isfinite(), hyperparameter
        assert all(g.isfinite().all() for g in gradients(out.loss, batch)), hyperparameter


@pytest.mark.parametrize(
    "name", [name for name in ALL if recipes()[name].hyperparameters.get("rollout_rs") == "seq_mean_k1"]
)
def test_an_infinite_rejection_threshold_rejects_nothing(name):
    assert objective(name, rollout_rs_threshold=math.inf)(everything()).keep.all()


def test_score_centering_refuses_a_band_without_an_inside():
    with pytest.raises(ValueError, match=r"low .3. must not exceed high .2."):
        objective("score_centering", weight="band", low=3, high=2)


def test_integers_are_numbers_and_hyperparameters_come_back_complete():
    o = objective("estr", tau=2)
    assert o.hyperparameters == {
        "tau": 2.0,
        "eps": 0.01,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "undecided": "keep",
        "denominator": "all",
    }
    assert "tau=2" in repr(o)


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_describes_itself_and_takes_its_own_defaults(name):
    recipe = recipes()[name]
    assert recipe.name == name
    assert recipe.description.endswith(".")
    assert "\n" not in recipe.description
    assert recipe.source
    assert recipe.confidence
    again = objective(name, **recipe.hyperparameters).hyperparameters
    assert again == objective(name).hyperparameters


def test_the_fixed_hyperparameter_names():
    expected = {
        "grpo": "clip_low clip_high dual_clip",
        "estr": "tau eps clip_low clip_high undecided",
        "icepop": "low high",
        "kpop": "phi weight",
        "tis": "cap",
        "tis_sequence": "cap",
        "decoupled_ppo": "cap",
        "cispo": "clip_low clip_high",
        "gspo": "clip_low clip_high",
        "sapo": "tau_positive tau_negative",
        "m2po": "budget floor_low floor_high",
        "dppo_tv": "low high cap",
        "dppo_kl": "delta cap",
        "trm": "delta estimator",
        "opsm": "delta",
        "vespo": "k_positive lambda_positive k_negative lambda_negative",
        "sat": "alpha hill",
        "etr": "base advantage_gain variance_gain",
        "aipo": "cap",
        "clip_cov": "ratio low high",
        "kl_cov": "ratio coef",
        "erc": "low high",
    }
    for name, words in expected.items():
        assert set(words.split()) <= set(recipes()[name].hyperparameters), name
    assert all("denominator" in recipe.hyperparameters for recipe in recipes().values())


@pytest.mark.parametrize("name", ALL)
def test_a_missing_field_is_named(name):
    batch = everything()
    for field in objective(name).needs:
        with pytest.raises(ValueError, match=field):
            objective(name)(without(batch, field))


def test_needs_and_edges():
    assert objective("icepop").needs == {"proximal_logprob"}
    assert objective("estr").needs == {"behavior_entropy"}
    assert objective("gspo").needs == set()
    assert "proximal_logprob" in objective("gspo").uses
    assert "proximal_logprob" not in objective("estr").uses
    assert objective("m2po", variant="areal").needs == {"proximal_logprob"}
    assert objective("trm", edge="E").needs == set()
    assert objective("vespo", token_cap=2).needs == {"proximal_logprob"}
    assert objective("a3po").needs == {"version", "target_version"}
    assert [name for name in ("gspo", "estr", "icepop", "reinforce") if objective(name).update_edge_only] == ["gspo"]


@pytest.mark.parametrize("name", [n for n in ALL if "B" in objective(n).edges and n != "a3po"])
def test_the_behavior_edge_raises_without_q(name):
    with pytest.raises(ValueError, match="proximal_logprob"):
        objective(name)(f8(proximal_logprob=None))


@pytest.mark.parametrize("name", ["gspo", "sapo", "cispo", "vespo", "kl_cov", "verl/disabled"])
def test_the_update_edge_falls_back_to_mu(name):
    batch = f8(proximal_logprob=None)
    expected = f8(proximal_logprob=batch.behavior_logprob)
    close(objective(name)(batch).token_loss, objective(name)(expected).token_loss.detach(), 12)


def test_erc_without_any_old_entropy():
    with pytest.raises(ValueError, match="proximal_entropy"):
        objective("erc")(token(0.5, 0.5, entropy=1.0))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_gives_zero_with_a_graph(name):
    batch = everything(lengths=[0, 0, 0])
    out = objective(name)(batch)
    assert out.loss.item() == 0
    assert out.loss.requires_grad
    out.loss.backward()
    assert batch.logprob.grad is not None
    assert out.token_loss.shape == out.keep.shape == out.weight.shape == (0,)
    assert all(math.isfinite(value) for value in out.metrics.values())
    objective(name).statistics(batch)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("field", ["logprob", "behavior_logprob", "advantage"])
def test_fault_B1_nothing_but_invalid_tokens(name, field):
    batch = everything(lengths=[2, 0, 3])
    broken = torch.full((5,), float("nan"), dtype=torch.float64)
    setattr(batch, field, broken.requires_grad_(field == "logprob"))
    out = objective(name)(batch, statistics=objective(name).statistics(batch))
    assert out.loss.item() == 0
    (gradient,) = torch.autograd.grad(out.loss, batch.logprob)
    assert gradient.tolist() == [0] * 5
    assert not out.keep.any()
    assert out.metrics["tokens/invalid"] == 5
    assert all(math.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("estr", {"tau": 0}),
        ("icepop", {"low": 90, "high": 100}),
        ("kpop", {"phi": 0}),
        ("verl/decoupled_geo_rs", {}),
        ("trm", {"delta": 0}),
        ("dppo_kl", {"delta": 0}),
    ],
)
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_fault_B1_everything_masked(name, options, denominator):
    logprob = column(-1, -2, -3).requires_grad_()
    batch = TokenBatch(
        logprob,
        column(-2, -3, -4),
        torch.ones(3),
        torch.arange(3),
        behavior_entropy=torch.zeros(3),
        proximal_logprob=column(-1.5, -2.5, -3.5),
    )
    out = objective(name, denominator=denominator, **options)(batch)
    assert out.metrics["gate/masked_fraction"] == 1
    assert out.loss.item() == 0
    out.loss.backward()
    assert logprob.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_dropped_tokens_leave_no_trace(name):
    batch = everything(12, seed=3, spread=1.0)
    out = objective(name)(batch)
    gradient = gradients(out.token_loss.sum(), batch)[0]
    dropped = ~out.keep
    assert (gradient[dropped] == 0).all()
    assert (out.weight[dropped] == 0).all()
    if name != "erc":
        assert (out.token_loss[dropped] == 0).all()
    assert not out.weight.requires_grad
    assert not out.keep.requires_grad


SPLITS = [[(0, 12)], [(0, 6), (6, 12)], [(0, 1), (1, 5), (5, 5), (5, 12)], [(i, i + 1) for i in range(12)]]


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("name", ALL)
def test_micro_batches_sum_to_the_whole_batch(name, denominator):
    o = objective(name, denominator=denominator)
    batch = everything(12, seed=5, spread=0.4)
    whole = o(batch, generator=torch.Generator().manual_seed(1))
    expected = gradients(whole.loss, batch)
    for split in SPLITS:
        parts = [batch.slice(a, b) for a, b in split]
        statistics = o.statistics(part for part in parts)
        counts = {"token_count": batch.tokens, "sequence_count": batch.sequence_count, "statistics": statistics}
        generator = torch.Generator().manual_seed(1)
        outs = [o(part, generator=generator, **counts) for part in parts]
        total = torch.stack([out.loss for out in outs]).sum()
        assert total.item() == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
        for found, wanted in zip(gradients(total, batch), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        merged = merge_metrics([(out.metrics, part.tokens) for out, part in zip(outs, parts, strict=True)])
        assert merged == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
        assert [k for out in outs for k in out.keep.tolist()] == whole.keep.tolist()


@pytest.mark.parametrize("name", ALL)
def test_statistics_have_no_graph_and_take_one_batch(name):
    batch = everything(6, seed=2)
    o = objective(name)
    found = o.statistics(batch)
    assert found.kept_tokens == o(batch).keep.sum()
    tensors = [x for part in found.measured if isinstance(part, tuple) for x in part]
    assert not any(x.requires_grad for x in tensors if isinstance(x, torch.Tensor))
    close(o(batch, statistics=found, generator=torch.Generator()).loss, o(batch, generator=torch.Generator()).loss, 12)


def test_counts_must_not_be_negative():
    with pytest.raises(ValueError, match="token_count"):
        objective("grpo")(f8(), token_count=-1)
    with pytest.raises(ValueError, match="sequence_count"):
        objective("gspo")(f8(), sequence_count=-1)
    assert objective("grpo")(f8(), token_count=16).loss.item() == pytest.approx(0.540132 / 2, abs=1e-6)
    assert objective("gspo")(f8(), sequence_count=4).loss.item() == pytest.approx(
        objective("gspo")(f8()).loss.item() / 2
    )


def test_parts_and_compositions_are_checked():
    with pytest.raises(ValueError, match="edge of 'x'"):
        Gate("x", "D", "token", lambda c: c.valid)
    with pytest.raises(ValueError, match="scope of 'x'"):
        Gate("x", "E", "word", lambda c: c.valid)
    with pytest.raises(ValueError, match="reduction"):
        Composition(surrogates.policy_gradient(), reduction="mean")
    with pytest.raises(ValueError, match="already a recipe named 'grpo'"):
        register(recipes()["grpo"])


def test_statistics_of_another_recipe_are_refused():
    with pytest.raises(ValueError, match=r"'tis'.*'icepop'"):
        objective("icepop")(f8(), statistics=objective("tis").statistics(f8()))


def test_what_are_no_statistics_and_no_counts_is_refused():
    with pytest.raises(ValueError, match=r"statistics must come from .*statistics\(batches\), got \{'tau': 1\}"):
        objective("icepop")(f8(), statistics={"tau": 1})
    for count in (math.nan, math.inf, "3", -1):
        with pytest.raises(ValueError, match=f"token_count must be a number of at least 0, got {count!r}"):
            objective("icepop")(f8(), token_count=count)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(name, dtype):
    low = everything(8, seed=7, dtype=dtype)
    out = objective(name)(low, generator=torch.Generator())
    assert out.loss.dtype == torch.float32
    exact = everything(8, seed=7, dtype=dtype)
    for field in fields(exact):
        value = getattr(exact, field.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(exact, field.name, value.double())
    reference = objective(name)(exact, generator=torch.Generator())
    assert reference.loss.dtype == torch.float64
    torch.testing.assert_close(out.loss.double(), reference.loss, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_metrics_have_the_same_names_everywhere(name):
    batch = everything(6)
    metrics = objective(name)(batch).metrics
    assert tuple(metrics) == NAMES
    delta = batch.logprob.detach() - batch.behavior_logprob
    assert metrics["tokens/action"] == batch.tokens
    assert metrics["mismatch/delta_abs"] == pytest.approx(delta.abs().mean().item())
    assert metrics["mismatch/ratio_deviation"] == pytest.approx(delta.expm1().abs().mean().item())
    assert metrics["mismatch/kl"] == pytest.approx((delta.exp() - 1 - delta).mean().item())
    assert all(type(value) is float for value in metrics.values())


def test_clip_fraction_counts_bound_tokens():
    assert objective("grpo")(f8()).metrics["clip/fraction"] == 4 / 8  # a2 a3 b1 b3
    assert objective("estr")(f8()).metrics["clip/fraction"] == 3 / 8  # a2 is dropped
    assert objective("cispo")(f8()).metrics["clip/fraction"] == 5 / 8  # a1 a2 a3 b1 b2
    assert objective("reinforce")(f8()).metrics["clip/fraction"] == 0


def test_denominators_of_sequence_means():
    batch = f8()
    batch.proximal_logprob = torch.cat([batch.proximal_logprob[:7], column(float("nan"))])
    fixed = objective("gspo", clip_low=5, clip_high=5)(batch)
    kept = objective("gspo", clip_low=5, clip_high=5, denominator="kept")(batch)
    a, b = fixed.token_loss.view(2, 4).sum(1).tolist()
    assert fixed.loss.item() == pytest.approx((a / 4 + b / 4) / 2)
    assert kept.loss.item() == pytest.approx((a / 4 + b / 3) / 2)


def interval(**options):
    delta = torch.tensor([0.05, 0.5, 0.9, 2.0], dtype=torch.float64)
    batch = TokenBatch(
        (delta - 3).requires_grad_(),
        torch.full_like(delta, -3),
        torch.ones(4),
        torch.arange(4),
        behavior_entropy=torch.full_like(delta, 0.1),
        behavior_entropy_upper=torch.full_like(delta, 1.0),
    )
    return objective("estr", **options)(batch)


def test_estr_has_three_verdicts_where_the_entropy_is_an_interval():
    assert interval(undecided="keep").keep.tolist() == [True, True, True, False]
    assert interval(undecided="drop").keep.tolist() == [True, False, False, False]
    assert interval().metrics["gate/undecided_fraction"] == 0.5
    assert interval(undecided="drop").metrics["gate/undecided_fraction"] == 0.5
    with pytest.raises(ValueError, match="2 tokens are undecided"):
        interval(undecided="error")
    assert interval(undecided="error", tau=100.0).keep.all()


def test_estr_with_a_missing_upper_end():
    batch = token([0.5, 0.5], [0.5, 0.5], behavior_entropy=[1.0, 1.0], behavior_entropy_upper=[math.inf, math.nan])
    out = objective("estr")(batch)
    assert out.keep.tolist() == [True, False]
    assert out.metrics["tokens/invalid"] == 1


def test_estr_tolerates_an_entropy_that_rounding_made_negative():
    batch = token([0.9, 0.9], [0.9, 0.5], behavior_entropy=[-1e-7, -0.5])
    assert objective("estr")(batch).keep.tolist() == [True, False]


def test_a_needed_entropy_that_is_nan_drops_the_token():
    batch = f8(behavior_entropy=torch.tensor([math.nan] + [1.0] * 7))
    out = objective("estr")(batch)
    assert not out.keep[0]
    assert out.metrics["tokens/invalid"] == 1
    assert objective("grpo")(batch).metrics["tokens/invalid"] == 0  # grpo does not look at it


def test_proximal_values_count_only_where_used():
    batch = f8(proximal_logprob=torch.tensor([-math.inf] + [-1.0] * 7))
    assert objective("tis")(batch).metrics["tokens/invalid"] == 1
    assert objective("estr")(batch).metrics["tokens/invalid"] == 0


def test_clip_cov_draws_from_the_generator():
    batch = token([0.5] * 40, [0.5] * 40, torch.linspace(-2, 2, 40), entropy=torch.ones(40))
    batch.logprob.data += torch.linspace(-2, 2, 40)
    options = {"ratio": 0.1, "low": 0.01, "high": 50, "clip_low": 1.0, "clip_high": 100.0}
    o = objective("clip_cov", **options)
    draws = [o(batch, generator=torch.Generator().manual_seed(seed)).keep for seed in range(6)]
    again = o(batch, generator=torch.Generator().manual_seed(0)).keep
    assert all((~keep).sum() == 4 for keep in draws)
    assert (again == draws[0]).all()
    assert any((keep != draws[0]).any() for keep in draws[1:])


def test_merge_metrics_weights_by_tokens():
    parts = [
        ({"loss": 0.5, "mismatch/kl": 1.0, "clip/fraction": 0.5, "tokens/invalid": 2.0}, 4),
        ({"loss": 0.25, "mismatch/kl": 4.0, "clip/fraction": 0.0, "tokens/invalid": 0.0}, 6),
    ]
    assert merge_metrics(parts) == {
        "loss": 0.75,
        "mismatch/kl": (2 * 1 + 6 * 4) / 8,
        "clip/fraction": 0.2,
        "tokens/invalid": 2,
    }
    assert merge_metrics([]) == {}
