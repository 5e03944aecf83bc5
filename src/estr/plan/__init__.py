"""What a cluster would do: a discrete-event simulation of engines, tools, learner and schedule, calibrated by a run."""
