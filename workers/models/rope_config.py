"""Reads the settings of the rotary embedding from config.json, in the old and the new form.

transformers 5 writes `rope_parameters`; older versions wrote `rope_theta` beside `rope_scaling`.
Knows nothing of tensors: `workers/layers/rope.py` turns the settings into angles.
"""

from collections.abc import Mapping
from math import isfinite, log
from typing import Any

from workers.specs.rope import RopeSpec

# rope_type -> (required keys, optional keys), as transformers reads them
SUPPORTED_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
}
PARTIAL = "partial_rotary_factor"
NEEDS_ORIGINAL_LENGTH = frozenset({"yarn", "llama3"})

# Their angles depend on the current length, so cached keys would have to be rotated again.
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def mscale(rope: RopeSpec) -> float:
    """Return the factor on q and on k by which DeepSeek's latent attention follows a lengthened embedding."""
    strength, factor = rope.scaling.get("mscale_all_dim", 0.0), rope.scaling.get("factor", 1.0)
    return 0.1 * strength * log(factor) + 1.0 if factor > 1 else 1.0


def parse_partial_rotary(raw: Mapping[str, Any], default: float, problems: list[str]) -> float:
    """Return the rotated part of a head, from the old or the new form."""
    for source in ("rope_parameters", "rope_scaling"):
        given = raw.get(source)
        if isinstance(given, dict) and given.get(PARTIAL) is not None:
            found, key = given[PARTIAL], f"{source}.{PARTIAL}"
            break
    else:
        found, key = raw.get(PARTIAL), PARTIAL
    if found is None:
        return default
    if not is_number(found) or not 0 < found <= 1:
        problems.append(f"{key} is {found!r}; expected a number > 0 and <= 1")
        return default
    return float(found)


def parse_rope(
    raw: Mapping[str, Any],
    default_theta: float,
    max_positions: int,
    problems: list[str],
    *,
    partial: bool = False,
) -> RopeSpec:
    """Return the rope settings of a config.json; complaints about them are added to `problems`.

    partial   the family may rotate a part of a head, which `parse_partial_rotary` reads
    """
    source = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(source) or {}
    if not isinstance(given, dict):
        problems.append(f"{source} is {given!r}; expected an object or null")
        return RopeSpec()
    parameters = {key: value for key, value in given.items() if value is not None}
    rope_type = _pop_type(parameters, source, problems)
    theta_key = f"{source}.rope_theta" if "rope_theta" in parameters else "rope_theta"
    theta = parameters.pop("rope_theta", raw.get("rope_theta", default_theta))
    if not is_number(theta) or theta <= 0:
        problems.append(f"{theta_key} is {theta!r}; expected a number > 0")
        theta = default_theta
    if partial or parameters.get(PARTIAL) == 1:
        parameters.pop(PARTIAL, None)
    if rope_type not in SUPPORTED_KEYS:
        why = (
            " (its angles change with the current length)" if rope_type in LENGTH_DEPENDENT else ""
        )
        problems.append(
            f"{source}.rope_type is {rope_type!r}{why}; supported: {', '.join(SUPPORTED_KEYS)}"
        )
        return RopeSpec()
    _check_parameters(parameters, rope_type, source, problems)
    if rope_type in NEEDS_ORIGINAL_LENGTH:
        parameters.setdefault("original_max_position_embeddings", max_positions)
    return RopeSpec(rope_type=rope_type, rope_theta=float(theta), scaling=parameters)


def _pop_type(parameters: dict[str, Any], source: str, problems: list[str]) -> Any:
    """Return `rope_type`, or `type`, its older name."""
    legacy = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", legacy or "default")
    if legacy is not None and legacy != rope_type:
        problems.append(
            f"{source}.type is {legacy!r} but {source}.rope_type is {rope_type!r}; expected one"
        )
    return rope_type


def _check_parameters(
    parameters: Mapping[str, Any], rope_type: str, source: str, problems: list[str]
) -> None:
    required, optional = SUPPORTED_KEYS[rope_type]
    for key in sorted(required - parameters.keys()):
        problems.append(f"{source}.{key} is missing; rope_type {rope_type!r} needs it")
    for key, value in parameters.items():
        if key not in required | optional:
            takes = ", ".join(sorted(required | optional)) or "no parameters"
            problems.append(f"{source}.{key} is {value!r}; rope_type {rope_type!r} takes {takes}")
        elif key == "truncate":
            if not isinstance(value, bool):
                problems.append(f"{source}.{key} is {value!r}; expected true or false")
        elif not is_number(value) or value <= 0:
            problems.append(f"{source}.{key} is {value!r}; expected a number > 0")


def is_number(value: Any) -> bool:
    """Return whether the value is a finite int or float; JSON's true and false are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
