"""Engines and further ranks of the learner as Ray actors, on one machine or many: ``runtime.kind = "ray"``.

The loop, the schedule, the ledger and the run directory are those of the local runtime; this package is another pool
behind them. ``connection`` starts or joins a cluster, ``placement`` reserves what an engine needs, ``engine`` is what
runs in the actors, ``handles`` the driver's view of them, ``pool`` keeps as many as there should be and ``lockstep``
serves schedules on a logical clock; ``ranks`` has the learner's further ranks. Its first is the driver's process.
"""
