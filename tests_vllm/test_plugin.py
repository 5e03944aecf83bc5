"""What the plugin computes, on vLLM's own sampler without a model: exact entropies of the final distribution."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from estr.engines.vllm import plugin

plugin.register()
REAL = 150_000


class Scheduler:
    max_num_seqs = 16


class Settings:
    scheduler_config = Scheduler()


def sampled(logits, asked, *, logprobs, temperature=1.0, top_k=None, top_p=None, min_p=0.0, mode=plugin.MODE):
    """vLLM's sampler on ``logits`` [n, V]; ``asked``: what each row asks for, None for nothing."""
    rows = plugin.AskingRows(None, logits.device, False)
    least = MinPLogitsProcessor(Settings(), logits.device, False)
    n = len(logits)
    params = [
        SamplingParams(logprobs=logprobs, min_p=min_p, extra_args=None if ask is None else {"estr": ask})
        for ask in asked
    ]
    update = BatchUpdate(n, removed=[], added=[(i, p, None, []) for i, p in enumerate(params)], moved=[])
    for processor in (rows, least):
        processor.update_state(update)
    zeros = torch.zeros(n)
    metadata = SamplingMetadata(
        temperature=torch.full((n,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None if top_p is None else torch.full((n,), top_p),
        top_k=None if top_k is None else torch.full((n,), top_k, dtype=torch.int32),
        generators={},
        max_num_logprobs=logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[] for _ in asked],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([least, rows]),
    )
    return Sampler(mode)(logits.clone(), metadata)


def by_hand(logits, temperature=1.0, top_k=None, top_p=None, min_p=0.0):
    """The distribution, float64 [n, V]: temperature, min-p, top-k, then top-p on what is left."""
    z = logits.double() / temperature
    p = z.softmax(-1)
    keep = p >= min_p * p.amax(-1, keepdim=True)
    if top_k is not None:
        keep &= z >= z.topk(top_k).values[:, -1:]
    if top_p is not None:
        left = torch.where(keep, z, -torch.inf).softmax(-1)
        order = left.argsort(-1, descending=True)
        before = left.gather(-1, order).cumsum(-1) - left.gather(-1, order)
        keep &= torch.zeros_like(keep).scatter(-1, order, before < top_p)
    return torch.where(keep, z, -torch.inf).softmax(-1)


def logits_of(rows, vocabulary, spread=3.0, seed=0):
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


SAMPLING = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("vocabulary", [300, REAL])
def test_entropy_and_log_probability_are_those_of_the_final_distribution(vocabulary, sampling):
    logits = logits_of(4, vocabulary)
    output = sampled(logits, ["entropy"] * 4, logprobs=1, **sampling)
    p = by_hand(logits, **sampling)
    want = torch.special.entr(p).sum(-1)
    token = output.sampled_token_ids.long()
    found = output.logprobs_tensors
    torch.testing.assert_close(found.logprobs[:, 1].double(), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.logprobs[:, 0].double(), p.gather(1, token)[:, 0].log(), atol=1e-4, rtol=0)
    plain = by_hand(logits)
    if sampling:
        assert (torch.special.entr(plain).sum(-1) - want).abs().min() > 1e-2, "any other logits would be noticed"


def test_fault_A13_flat_and_peaked_distributions_of_a_real_vocabulary():
    logits = torch.stack([torch.zeros(REAL), 40.0 * torch.nn.functional.one_hot(torch.tensor(5), REAL)])
    found = sampled(logits, ["entropy"] * 2, logprobs=1).logprobs_tensors.logprobs[:, 1]
    assert found.tolist() == pytest.approx([torch.tensor(float(REAL)).log().item(), 0.0], abs=1e-4)


def test_eight_bytes_a_token_leave_the_engine():
    logits = logits_of(3, 300)
    plain = sampled(logits, [None] * 3, logprobs=0).logprobs_tensors
    asking = sampled(logits, ["entropy"] * 3, logprobs=1).logprobs_tensors

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors[:3])

    assert asking.logprob_token_ids.dtype == torch.int32
    assert asking.logprobs.dtype == torch.float32
    assert size(asking) - size(plain) == 8 * 3


def test_rows_that_do_not_ask_stay_as_they_are():
    logits = logits_of(4, 300)
    plugin.STAMP.version = 12
    mixed = sampled(logits, ["entropy", None, 17, None], logprobs=3).logprobs_tensors
    p = by_hand(logits)
    best = p.topk(3)
    assert mixed.logprob_token_ids[1, 1:].tolist() == best.indices[1].tolist()
    assert mixed.logprob_token_ids[3, 1:].tolist() == best.indices[3].tolist()
    torch.testing.assert_close(mixed.logprobs[1, 1:].double(), best.values[1].log(), atol=1e-4, rtol=0)
    assert mixed.logprob_token_ids[0, 1:].tolist() == [312, *best.indices[0, :2].tolist()]
    assert mixed.logprob_token_ids[2, 1:].tolist() == [17, *best.indices[2, :2].tolist()]
    assert mixed.logprobs[2, 1].item() == pytest.approx(p[2, 17].log().item(), abs=1e-4)
    everyone = sampled(logits, ["entropy"] * 4, logprobs=3).logprobs_tensors
    assert everyone.logprob_token_ids.shape == (4, 4)
    assert everyone.logprob_token_ids[1, 2:].tolist() == best.indices[1, :2].tolist()


def test_without_processed_log_probabilities_nothing_is_stamped():
    logits = logits_of(2, 300)
    found = sampled(logits, ["entropy"] * 2, logprobs=1, temperature=0.5, mode="raw_logprobs").logprobs_tensors
    assert (found.logprob_token_ids[:, 1] < 300).all()


def test_rows_follow_their_requests_through_the_batch():
    rows = plugin.AskingRows(None, torch.device("cpu"), False)
    ask = SamplingParams(logprobs=1, extra_args={"estr": "entropy"})
    token = SamplingParams(logprobs=1, extra_args={"estr": 0})
    added = [(0, ask, None, []), (1, SamplingParams(), None, []), (2, token, None, [])]
    rows.update_state(BatchUpdate(3, removed=[], added=added, moved=[]))
    assert rows.rows == {0: -1, 2: 0}
    rows.update_state(BatchUpdate(3, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert rows.rows == {1: -1, 2: 0}
    rows.update_state(BatchUpdate(2, removed=[1], added=[], moved=[(2, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    assert rows.rows == {1: 0}


@pytest.mark.parametrize(("asked", "logprobs"), [("entropy", 0), ("entropy", None), ("entropies", 1), (-3, 1)])
def test_requests_that_cannot_be_answered_are_refused(asked, logprobs):
    with pytest.raises(ValueError, match="extra_args"):
        plugin.AskingRows.validate_params(SamplingParams(logprobs=logprobs, extra_args={"estr": asked}))


def test_vllm_finds_the_plugin_where_the_package_is_installed():
    for group, name in (("vllm.general_plugins", "register"), ("vllm.logits_processors", "AskingRows")):
        found = {point.value: point for point in importlib.metadata.entry_points(group=group)}
        assert found[f"estr.engines.vllm.plugin:{name}"].load() is getattr(plugin, name)
    assert plugin.processors() == []
