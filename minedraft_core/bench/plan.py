"""What a benchmark does: which engines it starts, on which cores or devices, and which runs each of them makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from minedraft_core.config import HEADS, MOST_DRAFTS, ConfigError
from minedraft_core.cores import NO_CORES, Cores, parse_cores, split_cores
from minedraft_core.types import Mode

ALL_CORES = "off-all-cores"
NATIVE = "native"
_SHARED = "-shared"
_TETRIS = "-tetris"
_BY_BATCH = "-by-batch"


@dataclass(frozen=True)
class Arm:
    """One engine of the benchmark. `name` is the row's mode; plain decoding on the drafter's cores too has a name of its own.

    On GPUs an arm has no cores. `shared` puts the drafter on the target's own device, `native` is vLLM's own speculative decoding,
    `tetris` verifies the best draft tokens of a batch, `by_batch` drafts as many as the plan says for a batch of its size.
    """

    name: str
    mode: Mode
    cores: Cores
    shared: bool = False
    native: bool = False
    tetris: bool = False
    by_batch: bool = False

    @property
    def plain(self) -> bool:
        """Whether k tokens are drafted for every request and all verified, by this pipeline."""
        return not (self.native or self.tetris or self.by_batch)

    @property
    def extra_devices(self) -> int:
        """CUDA devices beside the target's."""
        return int(self.mode is not Mode.OFF and not self.shared and not self.native)


@dataclass(frozen=True)
class Plan:
    """The runs of every arm: at each concurrency `warmup` that leave no figures, then `repeats`.

    All of that is done `rounds` times, with engines started anew. `acceptance` is the probability of a replay, None for none.
    `acceptance_length` is the mean that vLLM's synthetic acceptance keeps, None for drafts that are verified; `prompt_tokens` the length
    of random prompts, None for prompts of a file. `method` says what `draft` is.
    `tetris_capacity` and `tetris_extra` are for the arms with TETRIS, `per_batch_size` for those by batch, as in `MineDraftConfig`.
    """

    target: str
    draft: str | None
    num_tokens: int
    arms: tuple[Arm, ...]
    concurrency: tuple[int, ...]
    max_tokens: int
    repeats: int
    warmup: int
    rounds: int
    acceptance: float | None
    acceptance_length: float | None = None
    prompt_tokens: int | None = None
    compiled_drafter: bool = False
    drafter_fused: Literal["auto", "none", "attention", "layers"] = "auto"
    drafter_weights: Literal["as_saved", "fp8"] = "as_saved"
    method: Literal["draft_model", "eagle", "eagle3"] = "draft_model"
    per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    tetris_capacity: int = 0
    tetris_extra: int = 0

    @property
    def gpu_flags(self) -> tuple[str, ...]:
        """The flags in use that say something to a drafter on GPUs only."""
        given = {
            "--acceptance-length": self.acceptance_length is not None,
            "--drafter-compiled": self.compiled_drafter,
            "--drafter-fused": self.drafter_fused != "auto",
            "--drafter-weights": self.drafter_weights != "as_saved",
            "--method": self.method in HEADS,
        }
        return tuple(flag for flag, used in given.items() if used)


def named_cores(target: str, drafter: str, available: Sequence[int]) -> Cores:
    """The cores that two lists such as `0-3,8` name, or those that are chosen where a list is empty.

    Raises ConfigError for cores that are shared, missing or used up.
    """
    cores = split_cores(Cores(_read("--target-cores", target), _read("--drafter-cores", drafter)), available)
    if not cores.target or not cores.drafter:
        raise ConfigError(f"the benchmark needs a core for the target and another one for the drafter; allowed: {list(available)}")
    return cores


def _read(flag: str, text: str) -> tuple[int, ...]:
    try:
        return parse_cores(text) if text else ()
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def arms_of(modes: Sequence[str], cores: Cores) -> tuple[Arm, ...]:
    """The engines for these modes, in the order given; `off` is run on the target's cores and on all cores.

    Raises ConfigError for a mode that is unknown or named twice.
    """
    possible = {mode.value: Arm(mode, mode, cores) for mode in Mode}
    possible |= {f"{mode}{_TETRIS}": Arm(f"{mode}{_TETRIS}", mode, cores, tetris=True) for mode in Mode if mode is not Mode.OFF}
    possible |= {f"{mode}{_BY_BATCH}": Arm(f"{mode}{_BY_BATCH}", mode, cores, by_batch=True) for mode in (Mode.SEQUENTIAL, Mode.PARALLEL)}
    arms: list[Arm] = []
    for arm in _named(modes, possible):
        arms.append(arm)
        if arm.mode is Mode.OFF:
            arms.append(Arm(ALL_CORES, arm.mode, Cores((*cores.target, *cores.drafter), ())))
    return tuple(arms)


def gpu_arms_of(modes: Sequence[str]) -> tuple[Arm, ...]:
    """The engines for these modes on GPUs, in the order given. Raises ConfigError for a mode that is unknown or named twice."""
    possible = {mode.value: Arm(mode, mode, NO_CORES) for mode in Mode}
    possible |= {f"{mode}{_SHARED}": Arm(f"{mode}{_SHARED}", mode, NO_CORES, shared=True) for mode in (Mode.SEQUENTIAL, Mode.PARALLEL)}
    possible |= {f"{mode}{_TETRIS}": Arm(f"{mode}{_TETRIS}", mode, NO_CORES, tetris=True) for mode in (Mode.SEQUENTIAL, Mode.PARALLEL)}
    for shared in (False, True):
        names = {mode: f"{mode}{_SHARED if shared else ''}{_BY_BATCH}" for mode in (Mode.SEQUENTIAL, Mode.PARALLEL)}
        possible |= {name: Arm(name, mode, NO_CORES, shared=shared, by_batch=True) for mode, name in names.items()}
    possible[NATIVE] = Arm(NATIVE, Mode.SEQUENTIAL, NO_CORES, native=True)
    return _named(modes, possible)


def _named(modes: Sequence[str], possible: Mapping[str, Arm]) -> tuple[Arm, ...]:
    if not modes or len(set(modes)) != len(modes) or set(modes) - set(possible):
        raise ConfigError(f"--modes: {','.join(modes)!r} is not possible; name each of {', '.join(possible)} at most once")
    return tuple(possible[mode] for mode in modes)


def check(plan: Plan) -> Plan:
    """The plan itself. Raises ConfigError where it cannot be carried out."""
    modes = {arm.mode for arm in plan.arms}
    if modes != {Mode.OFF} and (not plan.draft or plan.num_tokens < 1):
        raise ConfigError("--draft and --num-speculative-tokens: speculation needs a drafter and at least 1 token")
    if plan.method in HEADS and Mode.PEARL in modes:
        raise ConfigError(f"--method {plan.method}: a head cannot draft ahead; leave pearl out of --modes")
    if plan.num_tokens + plan.tetris_extra > MOST_DRAFTS:
        raise ConfigError(f"--num-speculative-tokens and --tetris-extra-proposals: both together can be at most {MOST_DRAFTS}")
    if any(arm.by_batch for arm in plan.arms) != (plan.per_batch_size is not None):
        raise ConfigError(
            "--num-speculative-tokens-per-batch-size is for modes that end in -by-batch, and they need it: give both or neither"
        )
    if not plan.concurrency or len(set(plan.concurrency)) != len(plan.concurrency) or min(plan.concurrency) < 1:
        raise ConfigError(f"--concurrency: {','.join(map(str, plan.concurrency))!r} is not possible; give numbers of at least 1, each once")
    if (plan.tetris_capacity or plan.tetris_extra) and not any(arm.tetris for arm in plan.arms):
        raise ConfigError(
            "--tetris-capacity and --tetris-extra-proposals: none of --modes has TETRIS; name one such as sequential-tetris, or remove them"
        )
    idle = plan.gpu_flags if plan.acceptance is None else ("--acceptance", *plan.gpu_flags)
    if modes == {Mode.OFF} and idle:
        raise ConfigError(f"{' and '.join(idle)}: off alone does not draft; name another mode in --modes, or remove what is for drafts")
    if plan.acceptance is not None and plan.arms[0].mode is not Mode.OFF:
        raise ConfigError("--acceptance replays what plain decoding wrote: put off first in --modes")
    return plan
