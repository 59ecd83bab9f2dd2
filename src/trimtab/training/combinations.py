"""Which sections of a configuration go with which method."""

from __future__ import annotations

import logging

from trimtab.config import RunConfig
from trimtab.config_method import SFT
from trimtab.errors import InputError
from trimtab.objectives import find_method

logger = logging.getLogger("trimtab")


def check_combinations(config: RunConfig) -> None:
    """Refuse what the method cannot make use of; reads no file and loads nothing.

    Raises:
        InputError: says which key does not go with the method.
    """
    name = config.method["name"]
    if name == SFT:
        unused = {"teachers": config.teachers, "off_policy": config.off_policy, "process": config.process}
        for key in (key for key, value in unused.items() if value):
            raise InputError(f"{key}: method sft learns from the completions in data alone; leave it out")
        return
    _check_teachers(config)
    method = find_method(name)
    takes_steps = method.takes("step_rewards_NS")
    if takes_steps != (config.process is not None):
        reason = "needs a step scorer" if takes_steps else "has no use for steps; use method: grpo_process"
        raise InputError(f"process: {name} {reason}")
    weights_settings = method.split(config.method_settings)[0]
    # Where nothing is sampled, the stored completions may bring all rewards.
    if config.rewards == "none" and learns_from_rewards(config) and config.fresh_per_group:
        raise InputError(f"rewards: none, but {name} learns from rewards; name some, or use method: distill with eta 0")
    if config.off_policy is not None and (not method.at_every_update or weights_settings.get("form") == "token"):
        raise InputError(
            f"off_policy: {name} corrects for who sampled with importance ratios, and stored completions bring no "
            "log-probabilities; use method: gvpo or distill (form: sequence)"
        )
    if method.at_every_update and (config.sampling.top_p < 1 or config.sampling.top_k > 0):
        logger.warning(
            "%s reaches its optimum where the sampler covers it; sampling.top_p below 1 or sampling.top_k leave holes",
            name,
        )


def learns_from_rewards(config: RunConfig) -> bool:
    """Whether the method uses the rewards of whole completions: not distillation alone, nor the steps alone."""
    settings = find_method(config.method["name"]).split(config.method_settings)[0]
    return bool(settings.get("eta", 1.0)) and settings.get("outcome") != "none"


def _check_teachers(config: RunConfig) -> None:
    """Raise InputError unless there is a teacher for every lambda, and teachers only where a method has lambdas."""
    lambdas = find_method(config.method["name"]).split(config.method_settings)[0].get("lambdas")
    if lambdas is None and config.teachers:
        raise InputError(f"teachers: {config.method['name']} takes none; use method: distill")
    if lambdas is not None and len(lambdas) != len(config.teachers):
        raise InputError(
            f"teachers: there are {len(config.teachers)}, but method.lambdas has {len(lambdas)} numbers; give each "
            "teacher one"
        )
