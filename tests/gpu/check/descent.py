"""Coordinate descent: settings are changed one at a time as long as what is measured gets less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

LIKELIEST = 3  # of a coordinate's values, that are measured once more


def descend(
    start: Mapping,
    offered: Callable[[Mapping], Mapping[object, Sequence]],
    measure: Callable[[Mapping], float],
    *,
    rounds: int,
    noise: float,
    ended: Callable[[], bool],
) -> dict:
    """The best settings found, a value for each coordinate.

    `offered` says at the start of a round what else to try for which coordinate, in what order. `measure` is infinite for settings that do
    not run. A value is kept if it is better by more than the share `noise`, and is so again beside the best that is measured anew: of many
    values one is always lucky. When it has `ended`, what was measured of the last coordinate still counts.
    """
    best = dict(start)
    for _ in range(rounds):
        if ended():
            break
        before = best
        for coordinate, values in offered(best).items():
            if ended():
                return best
            limit = (1 - noise) * measure(best)
            found = {}
            for value in values:
                if ended():
                    break
                found[value] = measure({**best, coordinate: value})
            for value in sorted(found, key=found.__getitem__)[:LIKELIEST]:
                changed = {**best, coordinate: value}
                if found[value] < limit and measure(changed) < (1 - noise) * measure(best):
                    best = changed
                    break
        if best == before:
            break
    return best
