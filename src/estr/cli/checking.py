"""What ``--dry-run`` checks beside the configuration: that the model is there and can be loaded."""

from __future__ import annotations

from estr.config import ModelConfig
from estr.errors import UsageError, nearest


def check_model(model: ModelConfig) -> list[str]:
    """Sentences on what could not be checked; raises UsageError for a model that is not there or cannot be loaded.

    Weights are not read, and nothing is downloaded.
    """
    from estr.models.builtin import ARCHITECTURES
    from estr.models.load import check_model_directory, is_hub_name, locate

    if model.path.startswith("builtin:"):
        if model.path not in ARCHITECTURES:
            raise UsageError(f"model.path: there is no {model.path!r}{nearest(model.path, ARCHITECTURES)}")
        return []
    if is_hub_name(model.path):
        return [f"model.path = {model.path!r} is no directory here and taken for a hub name, which is not checked"]
    check_model_directory(locate(model.path, model.trust_remote_code), model.trust_remote_code)
    return []
