"""Environments and tasks: what a policy acts in, and where its problems come from."""

from estr.environments.base import Environment, Message, Problem, Reply, Task
from estr.environments.registry import TaskInfo, make_task, tasks

__all__ = ["Environment", "Message", "Problem", "Reply", "Task", "TaskInfo", "make_task", "tasks"]
