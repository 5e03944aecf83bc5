"""The runtime: the only room that knows engines, environments, schedule, learner and storage at once."""
