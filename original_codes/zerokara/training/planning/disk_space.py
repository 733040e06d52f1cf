"""The disk space that a run's checkpoints take, against what is free."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from zerokara.checkpoint import all_steps
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.training.planning.run_plan import RunPlan


def max_checkpoints(plan: RunPlan, save_interval: int) -> int:
    """Most checkpoints that exist at once, where one is saved every `save_interval` steps."""
    config, num_steps = plan.config, plan.schedule.num_steps
    if plan.task.saves_every_best and config.keep_best:
        save_interval = min(save_interval, config.eval_interval)
    # One more than is kept: an old one is deleted only when the new one is whole.
    standing = config.keep_last + 1 + (1 if config.keep_best and plan.data.num_valid_tokens else 0)
    if config.keep_every:
        standing += num_steps // math.lcm(config.keep_every, save_interval)
    return min(-(-num_steps // save_interval), standing)


def checkpoint_text(plan: RunPlan) -> str:
    """Disk space that the checkpoints take, and what is free, for people."""
    standing = max_checkpoints(plan, plan.config.save_interval)
    free = bytes_text(_free_bytes(plan.run_dir))
    each, needed = plan.checkpoint_bytes, standing * plan.checkpoint_bytes
    return f"{bytes_text(each)}; {standing} at once at most, {bytes_text(needed)} in all; {free} are free"


def check_disk(plan: RunPlan, beside_old: bool = False) -> None:
    """Check that the disk has space for the checkpoints, with `beside_old` next to those that an earlier run left.

    Raises:
        UserError: it has not; with the numbers and the settings that fit.
    """
    config, run_dir, each = plan.config, plan.run_dir, plan.checkpoint_bytes
    standing = max_checkpoints(plan, config.save_interval)
    existing = len(all_steps(run_dir)) if run_dir.exists() and not beside_old else 0
    needed = max(0, standing - existing) * each
    free = _free_bytes(run_dir)
    if needed > free:
        rule = (
            f"leaves no room for its checkpoints: {standing} of {bytes_text(each)} will stand "
            f"at once and need {bytes_text(needed)} more, {bytes_text(free)} are free"
        )
        remedy = f"make room, or choose another disk{_what_fits_on_disk(plan, existing + free // each)}"
        raise UserError(config.fault("output_model_dir", rule, remedy))


def _what_fits_on_disk(plan: RunPlan, room: int) -> str:
    """The settings with which at most `room` checkpoints stand at once."""
    config, num_steps = plan.config, plan.schedule.num_steps
    found = []
    if room >= 1:
        # So few saves that all of them may stay; or, where every so many are kept, few enough of these.
        unit = config.keep_every or 1
        times = -(-num_steps // (unit * room))
        besides = config.keep_last + 1 + (1 if config.keep_best and plan.data.num_valid_tokens else 0)
        if config.keep_every and room >= besides:
            times = min(times, num_steps // (unit * (room - besides + 1)) + 1)
        keeping = f" with keep_every: {unit * times}" if config.keep_every else ""
        found.append(f"save_interval: {unit * times} is the smallest that fits{keeping}")
    fixed = max_checkpoints(plan, config.save_interval) - config.keep_last
    if config.keep_last > 1 and room - fixed >= 1:
        found.append(f"keep_last: {room - fixed} fits")
    if config.keep_every:
        found.append("keep_every: 0 keeps the fewest")
    return "".join(f"; {words}" for words in found) or "; not even one checkpoint fits"


def _free_bytes(run_dir: Path) -> int:
    place = next(parent for parent in [run_dir.absolute(), *run_dir.absolute().parents] if parent.exists())
    return shutil.disk_usage(place).free
