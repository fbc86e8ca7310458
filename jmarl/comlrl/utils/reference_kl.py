"""The KL term to the untrained models, at CoMLRL's module path. The trainer computes it; see `kl_coef`."""

from __future__ import annotations

from typing import Any

from jmarl.comlrl.only_in_comlrl import refused_function

clone_reference_models = refused_function("clone_reference_models")
load_reference_models_from_sources = refused_function("load_reference_models_from_sources")
reference_kl_for_sequence = refused_function("reference_kl_for_sequence")
resolve_reference_devices = refused_function("resolve_reference_devices")


def reference_kl_enabled(args: Any) -> bool:
    """Return whether a configuration has the KL term."""
    return bool(args.reference_kl_enabled or args.kl_coef)


def reference_kl_coef(args: Any) -> float:
    """Return the coefficient of the KL term, as it was set, also where it is off."""
    return float(args.kl_coef or args.reference_kl_coef)


def validate_reference_kl_config(args: Any, expected_count: int) -> None:
    """Do nothing: a configuration has checked its settings when it was made."""
