"""The loss guard: whether the loss has left its way, and which data led there. Pure arithmetic on agreed numbers.

A loss is bad when it is more than `threshold` above the recent level and outside its noise, or not finite. PATIENCE bad
ones in a row are a spike: a single odd batch is none, and what stays up after an update was not the batch. The level is
the median of the last WINDOW losses and the noise their median deviation, so that a few odd ones move neither.
"""

import dataclasses
import math
import statistics
from typing import NamedTuple

WINDOW = 100  # losses that make the level
FEWEST = 20  # before so many there is no level
PATIENCE = 3
# Updates before the first bad loss that are held to have led to it: a loss shows the update before it.
LOOKBACK = 5
# Of normal noise one loss in 30,000 is so far out; three in a row are not seen in any run's life.
NOISE_WIDTHS = 4.0
# The median deviation of normal noise is that much smaller than its standard deviation.
MEDIAN_TO_STANDARD = 1.4826
MOST_ROLLBACKS = 3
# A checkpoint so many steps old lies before anything that a spike which is just being noticed may have spoiled.
STABLE_AGE = LOOKBACK + PATIENCE + 2


@dataclasses.dataclass(frozen=True)
class Watch:
    """What the guard remembers, for checkpoints."""

    recent: tuple[float, ...] = ()  # the last losses, finite all
    suspects: tuple[float, ...] = ()  # bad ones in a row, as far as they are finite; not among the recent yet
    bad: int = 0  # bad ones in a row


class Spike(NamedTuple):
    """Bad losses in a row, and the updates to undo: numbers of optimizer steps, counted from 0."""

    level: float
    losses: tuple[float, ...]
    first_update: int  # the first one that is undone and whose data are skipped
    last_update: int  # the last one whose data are skipped


def judge(watch: Watch, step: int, loss: float, threshold: float, armed_from: int) -> tuple[Watch, Spike | None]:
    """Take the loss of a step (counted from 1; NaN: its update was skipped); return what to remember, and a spike.

    threshold: share above the level, as 0.1. armed_from: the first update that may be undone; a spike whose data begin
    before it is taken as the new level.
    """
    if not _is_bad(watch, loss, threshold):
        recent = (*watch.recent, *watch.suspects, loss) if math.isfinite(loss) else watch.recent
        return Watch(recent[-WINDOW:]), None
    suspects = (*watch.suspects, loss) if math.isfinite(loss) else watch.suspects
    watch = Watch(watch.recent, suspects, watch.bad + 1)
    if watch.bad < PATIENCE:
        return watch, None
    first_bad = step - watch.bad  # as an update, counted from 0; its loss was measured before it
    spike = Spike(statistics.median(watch.recent), watch.suspects, first_bad - LOOKBACK, step - 1)
    # What cannot be undone is the level from now on.
    return Watch(watch.suspects), spike if spike.first_update >= armed_from else None


def _is_bad(watch: Watch, loss: float, threshold: float) -> bool:
    if len(watch.recent) < FEWEST:
        return False
    if not math.isfinite(loss):
        return True
    level = statistics.median(watch.recent)
    noise = MEDIAN_TO_STANDARD * statistics.median(abs(value - level) for value in watch.recent)
    return loss > level + max(threshold * level, NOISE_WIDTHS * noise)
