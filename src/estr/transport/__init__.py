"""Weights from the learner to running engines, through shared memory."""

from estr.transport.shared_weights import Publication, WeightPublisher, WeightReader, remove_leftovers

__all__ = ["Publication", "WeightPublisher", "WeightReader", "remove_leftovers"]
