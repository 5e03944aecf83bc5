"""How fast an engine generates that has the machine to itself: the work of a finished run, without its learner."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from estr.models import load_model, resolve_model
from estr.runtime.builders import build_rollout_worker, build_task
from estr.runtime.messages import Failed, Finished, Job
from estr.storage.run_directory import RunDirectory


def engine_alone(run: Path, in_flight: int, batch: int, batches: int) -> float:
    """Seconds for ``batch`` trajectories of the run's task by one engine with the run's slots.

    ``in_flight`` trajectories are begun at any time, as many as the run's staleness bound allows: nobody waits for a
    group or for a learner. Measured over ``batches`` of them, after as many as are in flight have finished. The weights
    are those that the run began with, the engine has one thread, and nothing is kept for a resume.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = RunDirectory.open(run).config()
    task = build_task(config)
    loaded = load_model(resolve_model(config.model, task), "float32")
    worker = build_rollout_worker(config, task, loaded.model, loaded.tokenizer)
    worker.engine.set_weights(0, {name: tensor.detach() for name, tensor in loaded.model.named_parameters()})
    size, begun, finished, start = config.rollout.group_size, 0, 0, 0.0
    while finished < in_flight + batches * batch:
        while begun - finished < in_flight:
            group, sibling = divmod(begun, size)
            worker.submit(Job(group, sibling, 0, task.train_problem(group), config.run.seed))
            begun += 1
        if worker.idle:
            time.sleep(0.001)
        for result in worker.tick():
            assert not isinstance(result, Failed), result
            finished += isinstance(result, Finished)
        if not start and finished >= in_flight:
            start, finished_before = time.perf_counter(), finished
    seconds = (time.perf_counter() - start) / (finished - finished_before) * batch
    worker.cancel_all()
    torch.set_num_threads(threads)
    return seconds
